/* Attention with grouped heads on the CPU, from C. docs/guide-c.md shows this file. */
#include <math.h>
#include <regard/regard.h>
#include <stdio.h>

enum { B = 2, Hq = 8, Hkv = 2, S = 500, D = 64 };
static float q[B * Hq * S * D], k[B * Hkv * S * D], v[B * Hkv * S * D], out[B * Hq * S * D];

int main(void) {
  for (int i = 0; i < B * Hq * S * D; ++i) q[i] = sinf((float)i);
  for (int i = 0; i < B * Hkv * S * D; ++i) k[i] = cosf(3 * (float)i), v[i] = 1;

  regard_attention attention = REGARD_ATTENTION_INIT;
  attention.q = regard_dense(q, REGARD_F32, 4, (const int64_t[]){B, Hq, S, D});
  attention.k = regard_dense(k, REGARD_F32, 4, (const int64_t[]){B, Hkv, S, D});
  attention.v = regard_dense(v, REGARD_F32, 4, (const int64_t[]){B, Hkv, S, D});
  attention.window_left = 100;
  regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
  tensors.out = regard_dense(out, REGARD_F32, 4, (const int64_t[]){B, Hq, S, D});

  if (regard_forward(&attention, &tensors, NULL) != REGARD_OK) return puts(regard_last_error()), 1;
  printf("regard %s: a mean of ones is %.6f\n", regard_version(), out[S * D]);
  return 0;
}
