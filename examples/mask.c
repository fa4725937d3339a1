// A mask that the calls of two layers share; docs/guide-c.md shows its middle part.
#include <math.h>
#include <regard/regard.h>
#include <stdio.h>
#include <string.h>

enum { H = 2, S = 300, D = 16 };
static float q[H * S * D], k[H * S * D], v[H * S * D], out[2][H * S * D], expected[H * S * D];
static int32_t spans[S][2];

int main(void) {
  for (int i = 0; i < H * S * D; ++i) {
    q[i] = sinf((float)i);
    k[i] = cosf(3 * (float)i);
    v[i] = sinf(7 * (float)i);
  }
  for (int i = 0; i < S; ++i) {
    spans[i][0] = i / 100 * 100;
    spans[i][1] = spans[i][0] + 100;
  }
  regard_attention attention = REGARD_ATTENTION_INIT;
  attention.q = regard_dense(q, REGARD_F32, 4, (const int64_t[]){1, H, S, D});
  attention.k = regard_dense(k, REGARD_F32, 4, (const int64_t[]){1, H, S, D});
  attention.v = regard_dense(v, REGARD_F32, 4, (const int64_t[]){1, H, S, D});
  regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
  // [mask]
  regard_mask* mask = NULL;
  attention.row_spans = regard_dense(spans, REGARD_I32, 2, (const int64_t[]){S, 2});
  // On a GPU: device memory of as many bytes as regard_mask_memory says, and a regard_run.
  if (regard_mask_make(&attention, NULL, 0, NULL, &mask) != REGARD_OK)
    return puts(regard_last_error()), 1;
  attention.row_spans = (regard_tensor){0};
  attention.visible = mask;
  for (int layer = 0; layer < 2; ++layer) {
    tensors.out = regard_dense(out[layer], REGARD_F32, 4, (const int64_t[]){1, H, S, D});
    if (regard_forward(&attention, &tensors, NULL) != REGARD_OK)
      return puts(regard_last_error()), 1;
  }
  attention.visible = NULL;
  regard_mask_free(mask);
  // [/mask]
  attention.row_spans = regard_dense(spans, REGARD_I32, 2, (const int64_t[]){S, 2});
  tensors.out = regard_dense(expected, REGARD_F32, 4, (const int64_t[]){1, H, S, D});
  if (regard_forward(&attention, &tensors, NULL) != REGARD_OK) return puts(regard_last_error()), 1;
  const int same = memcmp(out[0], expected, sizeof expected) == 0 &&
                   memcmp(out[1], expected, sizeof expected) == 0;
  puts(same ? "both layers have the results of the spans" : "wrong results");
  return !same;
}
