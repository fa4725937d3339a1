// A plug-in that contains the static library and exports one call of it, on several threads.
#include <regard/regard.h>

enum { S = 200, D = 8 };

__attribute__((visibility("default"))) int plugin_call(void) {
  static float q[4 * S * D], out[4 * S * D];
  const int64_t sizes[] = {1, 4, S, D};
  regard_attention attention = REGARD_ATTENTION_INIT;
  attention.q = attention.k = attention.v = regard_dense(q, REGARD_F32, 4, sizes);
  regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
  tensors.out = regard_dense(out, REGARD_F32, 4, sizes);
  regard_run run = REGARD_RUN_INIT;
  run.threads = 3;
  return regard_forward(&attention, &tensors, &run);
}
