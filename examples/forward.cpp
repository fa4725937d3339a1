// A causal forward and backward pass over dense f32 tensors; README.md shows its middle part.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <regard/regard.hpp>
#include <vector>

int main() {
  const std::int64_t B = 1, H = 8, S = 1000, D = 64, n = B * H * S * D;
  std::vector<float> q(n), k(n), v(n), out(n), lse(B * H * S), dout(n, 1), dq(n), dk(n), dv(n);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<float>(i);
    q[i] = std::sin(x), k[i] = std::cos(3 * x), v[i] = static_cast<float>(i % 7);
  }

  // [call]
  const auto tensor = [&](auto& x) { return regard::Tensor{x.data(), regard::f32, {B, H, S, D}}; };
  const regard::Tensor log_sums{lse.data(), regard::f32, {B, H, S}};
  const regard::Attention attention{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .causal = regard::Causal::bottom_right};

  regard::forward(attention, {.out = tensor(out), .lse = log_sums});
  regard::backward(attention, {.out = tensor(out), .lse = log_sums, .dout = tensor(dout)},
                   {.dq = tensor(dq), .dk = tensor(dk), .dv = tensor(dv)});
  std::cout << regard::explain(attention, regard::Pass::backward);  // which kernel ran, and why
  // [/call]

  // Each row of weights adds up to 1, so dv holds as much as dout: n in all.
  std::printf("sum of dv: %.1f of %lld\n", std::accumulate(dv.begin(), dv.end(), 0.0),
              static_cast<long long>(n));
}
