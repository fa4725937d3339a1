// Causal attention and its gradients on the CPU. The README shows this file.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <regard/regard.hpp>
#include <vector>

int main() {
  const std::int64_t B = 1, H = 8, S = 1000, D = 64, n = B * H * S * D;
  std::vector<float> q(n), k(n), v(n), out(n), lse(B * H * S), dout(n, 1), dq(n), dk(n), dv(n);
  for (std::int64_t i = 0; i < n; ++i) q[i] = std::sin(i), k[i] = std::cos(3 * i), v[i] = i % 7;
  const auto rows = [&](auto& x) { return regard::Tensor{x.data(), regard::f32, {B, H, S, D}}; };
  const regard::Tensor sums{lse.data(), regard::f32, {B, H, S}};

  const regard::Attention attention{
      .q = rows(q), .k = rows(k), .v = rows(v), .causal = regard::Causal::bottom_right};
  regard::forward(attention, {.out = rows(out), .lse = sums});
  regard::backward(attention, {.out = rows(out), .lse = sums, .dout = rows(dout)},
                   {.dq = rows(dq), .dk = rows(dk), .dv = rows(dv)});

  std::cout << regard::explain(attention, regard::Pass::backward);
  // Each row of weights adds up to 1, so dv holds as much as dout: n in all.
  std::printf("sum of dv: %.1f of %lld\n", std::accumulate(dv.begin(), dv.end(), 0.0),
              static_cast<long long>(n));
}
