#include "plan/cuda/whole_keys.hpp"

#include "plan/cuda/facts.hpp"
#include "plan/cuda/families.hpp"

namespace regard {
namespace {

// Microseconds that memory takes for the bytes of an element of the rows: of q and dq, and of out
// and dout.
double of_memory(const Sizes& s, double bytes, double bytes_v) {
  constexpr double kBytes = 4.5e6;  // in a microsecond (H200)
  const double rows = double(s.batch) * double(s.heads_q) * double(s.len_q);
  return rows * (bytes * double(s.dim) + bytes_v * double(s.dim_v)) / kBytes;
}

// wgmma: the delta kernel reads out and dout and clears the sums of dq in f32, which the main
// kernel adds to, and the third one reads them and writes dq. docs/notes/gpu-wgmma-backward.md,
// "Few keys and many rows", has what was measured.
bool is_faster_for_many_rows(const Facts& f) {
  constexpr double kLaunches = 4;
  const Problem& p = f.problem;
  const RowBlocks of_mma = {.at_once = f.chip.multiprocessors, .whole_keys = true};
  const double mma = larger(row_splits_for(p, of_mma).time, of_memory(p.sizes, 4, 4));
  const double wgmma =
      row_splits_for(p, row_blocks_of_wgmma(f)).time + of_memory(p.sizes, 16, 6) + kLaunches;
  return mma < wgmma;
}

}  // namespace

RowBlocks row_blocks_of_wgmma(const Facts& f) {
  return {.at_once = f.chip.multiprocessors, .as_wgmma = true, .in_pairs = may_have_cta_pairs(f)};
}

// H100, us, wgmma and mma: 3072 heads of 64 rows, D 64: 190 and 82, causal 212 and 90; 32 heads of
// 128 rows, D 64: 13.1 and 12.9, causal 14.7 and 16.6; 160 heads of 96 rows, D 88, causal: 32.2 and
// 33.5.
bool repays_whole_keys(const Facts& f) {
  constexpr int64 kFewRows = 64, kFewerRows = 112, kOneTile = 128, kSomeRows = 256;
  const Problem& p = f.problem;
  if (!may_have_whole_keys(p)) return false;
  const int64 rows = p.sizes.group() * p.sizes.len_q;
  const int64 columns = larger(p.sizes.dim, p.sizes.dim_v);
  const double multiprocessors = double(f.chip.multiprocessors);
  const double heads = double(p.sizes.batch) * double(p.sizes.heads_kv);
  if (rows <= kFewRows) return true;
  if (rows <= kOneTile) {
    const bool most = columns <= 64 || rows > kFewerRows || heads < multiprocessors;
    return !hides_pairs(p) || (2 * heads >= multiprocessors && most);
  }
  if (rows <= kSomeRows) return 4 * heads >= 3 * multiprocessors;
  if (hides_pairs(p)) return heads >= 2 * multiprocessors;
  return is_faster_for_many_rows(f);
}

}  // namespace regard
