#include "cpu/heads_by_terms.hpp"

#include <cmath>

#include "rows/element.hpp"
#include "threads/threads.hpp"

namespace regard::cpu_backend {
namespace {

// The exponents of infinities and NaN have all bits set. One comparison for the whole row, so that
// the compiler takes many elements at once.
bool is_finite_row(const std::uint16_t* row, int64 count) {
  constexpr std::uint16_t kExponent = 0x7c00;
  std::uint16_t found = 0;
  for (int64 d = 0; d < count; ++d) found |= (row[d] & kExponent) == kExponent;
  return found == 0;
}

struct Rows {
  const Problem& problem;
  const Sequence& seq;
  int64 b;

  bool are_finite(const View& x, int64 head, int64 first, int64 rows, int64 dim) const {
    const auto* const data = static_cast<const std::uint16_t*>(x.data);
    for (int64 i = 0; i < rows; ++i) {
      if (!is_finite_row(data + offset_of(x.strides, b, head, first, i), dim)) return false;
    }
    return true;
  }
  bool queries_are_finite(int64 head) const {
    const Problem& p = problem;
    const auto has_finite_values = [&](const View& x) {
      for (int64 i = 0; x.given() && i < seq.len_q; ++i) {
        const int64 at = offset_of(x.strides, b, head, seq.first_q, i);
        if (!std::isfinite(load_element(x, at))) return false;
      }
      return true;
    };
    return are_finite(p.q, head, seq.first_q, seq.len_q, p.sizes.dim) &&
           are_finite(p.dout, head, seq.first_q, seq.len_q, p.sizes.dim_v) &&
           has_finite_values(p.dlse) && has_finite_values(p.delta);
  }
  bool keys_are_finite(int64 kv) const {
    const Problem& p = problem;
    return are_finite(p.k, kv, seq.first_k, seq.len_k, p.sizes.dim) &&
           are_finite(p.v, kv, seq.first_k, seq.len_k, p.sizes.dim_v);
  }
};

}  // namespace

HeadsByTerms::HeadsByTerms(const Problem& p, const Batch& batch, int workers, const Run& run)
    : heads_(p.sizes.heads_kv), served_(std::size_t(p.sizes.batch * heads_)) {
  parallel_tasks(p.sizes.batch * heads_, workers, run, [&](int64 n, int) {
    const int64 b = n / heads_, kv = n % heads_, group = p.sizes.group();
    const Rows rows{p, batch[b].seq, b};
    bool served = repays_terms(rows.seq.len_q, rows.seq.len_k) && rows.keys_are_finite(kv);
    for (int64 g = 0; g < group && served; ++g) served = rows.queries_are_finite(kv * group + g);
    served_[std::size_t(n)] = served;
  });
}

}  // namespace regard::cpu_backend
