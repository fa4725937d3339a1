// Which rank has which blocks of rows: five ways to deal the blocks of a sequence.
//
// Each returns, for each rank, the numbers of its blocks in ascending order. Every block is dealt
// once. The last block, which may be shorter, is therefore the last one of its rank.
#pragma once

#include <cstdint>
#include <vector>

namespace regard::distributed {

using Blocks = std::vector<std::vector<std::int64_t>>;

// Neighbouring blocks to one rank; numbers of blocks differ by one at most.
Blocks deal_contiguous(std::int64_t count, int ranks);

// Neighbouring blocks to one rank, cut where the areas before a cut are nearest to equal shares.
Blocks deal_by_area(const std::vector<double>& areas, int ranks);

// Two chunks for each rank, one from the front and one from the back of the sequence: with a causal
// mask their areas add up to nearly the same for all ranks. Where blocks do not divide into 2 ranks
// chunks, some neighbouring chunks are longer by a block: those for which the largest area of a
// rank is the smallest.
Blocks deal_zigzag(const std::vector<double>& areas, int ranks);

// The largest block that is left goes to the rank with the smallest area so far. Numbers of blocks
// differ by one at most, so that work which does not depend on the mask is spread evenly as well.
Blocks deal_greedy(const std::vector<double>& areas, int ranks);

// Each document to few ranks, those with the least area so far, as many blocks to each rank.
// labels: equal for neighbouring blocks of one document. shares: to how many times as many ranks as
// a document needs, by its blocks and its area; more make areas more even, and more keys move.
Blocks deal_documents(const std::vector<double>& areas, const std::vector<std::int64_t>& labels,
                      int ranks, double shares);

// The sum over some of the blocks.
double area_of(const std::vector<double>& areas, const std::vector<std::int64_t>& blocks);

}  // namespace regard::distributed
