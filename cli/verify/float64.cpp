// Converts every input exactly to f64 and runs the backend "reference".
#include "verify/float64.hpp"

namespace regard::cli {

Results float64_reference(const Attention& attention, const Tensor& dout, const Tensor& dlse,
                          const WantedTypes& wanted, int threads) {
  const Array q = converted(attention.q, f64), k = converted(attention.k, f64);
  const Array v = converted(attention.v, f64), bias = converted(attention.bias, f64);
  Attention wide = attention;
  wide.q = q.tensor();
  wide.k = k.tensor();
  wide.v = v.tensor();
  wide.bias = bias.tensor();
  Run run;
  run.backend = "reference";
  run.threads = threads;
  Results r = hidden_results(attention, wanted);
  forward(wide, {.out = r.out.tensor(), .lse = r.lse.tensor()}, run);
  if (!wanted.backward()) return r;
  const Array wide_dout = converted(dout, f64), wide_dlse = converted(dlse, f64);
  Array dsink;  // the API's dsink is f32 whatever the type
  if (r.dsink.given()) dsink = Array(f32, r.dsink.sizes);
  backward(wide,
           {.out = r.out.tensor(),
            .lse = r.lse.tensor(),
            .dout = wide_dout.tensor(),
            .dlse = wide_dlse.tensor()},
           {.dq = r.dq.tensor(),
            .dk = r.dk.tensor(),
            .dv = r.dv.tensor(),
            .dbias = r.dbias.tensor(),
            .dsink = dsink.tensor()},
           run);
  for (Index h = 0; h < dsink.count(); ++h) r.dsink.set(h, dsink.get(h));
  return r;
}

}  // namespace regard::cli
