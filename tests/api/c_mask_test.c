/* regard_mask from a C11 program: results of the tensors, bit by bit; errors; older callers.
 *
 * Prints "N passed, 0 failed"; exits 1 when a check failed. */
#include <regard/regard.h>
#include <stdio.h>
#include <string.h>

static int passed = 0;
static int failed = 0;

static void check_at(int line, int holds, const char* what) {
  if (holds) {
    ++passed;
  } else {
    ++failed;
    printf("line %d: %s\n  last error: %s\n", line, what, regard_last_error());
  }
}
#define CHECK(condition) check_at(__LINE__, (condition) != 0, #condition)

static void expect_at(int line, regard_status status, const char* error) {
  check_at(line, status == REGARD_INVALID_ARGUMENT, "status is invalid_argument");
  check_at(line, strcmp(regard_last_error(), error) == 0, error);
}
#define EXPECT(call, error) expect_at(__LINE__, call, error)

enum { B = 2, H = 4, SQ = 5, SK = 7, D = 3 };

static float q[B][H][SQ][D], k[B][H][SK][D], v[B][H][SK][D], dout[B][H][SQ][D];
static unsigned char shown[SQ][SK];
static struct {
  float out[B][H][SQ][D], lse[B][H][SQ], dq[B][H][SQ][D], dk[B][H][SK][D], dv[B][H][SK][D];
} results, wanted;

static regard_tensor rows(const void* data, int64_t length) {
  return regard_dense(data, REGARD_F32, 4, (const int64_t[]){B, H, length, D});
}

static void fill(void* to, size_t bytes, unsigned seed) {
  float* values = to;
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static regard_attention problem(void) {
  regard_attention a = REGARD_ATTENTION_INIT;
  a.q = rows(q, SQ);
  a.k = rows(k, SK);
  a.v = rows(v, SK);
  return a;
}

static regard_tensor mask_tensor(void) {
  return regard_dense(shown, REGARD_BOOL, 2, (const int64_t[]){SQ, SK});
}

static regard_status forward(const regard_attention* a) {
  regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
  tensors.out = rows(results.out, SQ);
  tensors.lse = regard_dense(results.lse, REGARD_F32, 3, (const int64_t[]){B, H, SQ});
  return regard_forward(a, &tensors, NULL);
}

static regard_status both(const regard_attention* a) {
  regard_backward_tensors tensors = REGARD_BACKWARD_TENSORS_INIT;
  tensors.out = rows(results.out, SQ);
  tensors.lse = regard_dense(results.lse, REGARD_F32, 3, (const int64_t[]){B, H, SQ});
  tensors.dout = rows(dout, SQ);
  tensors.dq = rows(results.dq, SQ);
  tensors.dk = rows(results.dk, SK);
  tensors.dv = rows(results.dv, SK);
  memset(&results, 0x5a, sizeof(results));
  const regard_status status = forward(a);
  return status == REGARD_OK ? regard_backward(a, &tensors, NULL) : status;
}

static int as_wanted(void) { return memcmp(&results, &wanted, sizeof(results)) == 0; }

static void test_results(regard_mask* mask) {
  regard_attention a = problem();
  a.mask = mask_tensor();
  CHECK(both(&a) == REGARD_OK);
  wanted = results;
  a.mask.type = REGARD_NONE;
  CHECK(both(&a) == REGARD_OK && !as_wanted());
  a.visible = mask;
  CHECK(both(&a) == REGARD_OK && as_wanted());

  /* A caller that was built before the field. */
  a.size = offsetof(regard_attention, visible);
  CHECK(both(&a) == REGARD_OK && !as_wanted());
}

static void test_errors(regard_mask* mask) {
  size_t bytes = 0;
  regard_mask* untouched = mask;
  regard_attention a = problem();
  a.mask = mask_tensor();
  EXPECT(regard_mask_make(&a, NULL, 0, NULL, NULL), "mask = null: must be given");
  EXPECT(regard_mask_memory(&a, NULL, NULL), "bytes = null: must be given");
  EXPECT(regard_mask_memory(NULL, NULL, &bytes), "attention = null: must be given");
  a.visible = mask;
  EXPECT(forward(&a), "mask = bool [5, 7]: must not be given next to visible");
  a.mask.type = REGARD_NONE;
  EXPECT(regard_mask_make(&a, NULL, 0, NULL, &untouched),
         "visible = a Mask: a Mask is made of mask, row_spans, key_spans");
  a.visible = NULL;
  EXPECT(regard_mask_make(&a, NULL, 0, NULL, &untouched),
         "mask = (not given): a Mask is made of mask, row_spans or key_spans: one of them must be "
         "given");
  CHECK(untouched == mask);
  a.visible = mask;
  a.q.sizes[2] = 3;
  EXPECT(forward(&a), "visible = a Mask for 2 x 4 heads, 5 x 7: the call has 2 x 4 heads, 3 x 7");
}

static void test_memory(void) {
  size_t bytes = 1;
  regard_attention a = problem();
  a.mask = mask_tensor();
  CHECK(regard_mask_memory(&a, NULL, &bytes) == REGARD_OK && bytes == 0);
  regard_run run = REGARD_RUN_INIT;
  run.device = REGARD_DEVICE_CHIP;
  run.device_name = "sm_90";
  a.q = a.k = a.v = regard_dense(NULL, REGARD_BF16, 4, (const int64_t[]){1, 1, 4096, 64});
  a.mask = regard_dense(NULL, REGARD_BOOL, 2, (const int64_t[]){4096, 4096});
  CHECK(regard_mask_memory(&a, &run, &bytes) == REGARD_OK && bytes > 0 && bytes % 256 == 0);
}

int main(void) {
  fill(q, sizeof(q), 1);
  fill(k, sizeof(k), 2);
  fill(v, sizeof(v), 3);
  fill(dout, sizeof(dout), 4);
  for (int i = 0; i < SQ; ++i) {
    for (int j = 0; j < SK; ++j) shown[i][j] = (i + 2 * j) % 3 != 0;
  }
  regard_attention a = problem();
  a.mask = mask_tensor();
  regard_mask* mask = NULL;
  CHECK(regard_mask_make(&a, NULL, 0, NULL, &mask) == REGARD_OK && mask);
  test_results(mask);
  test_errors(mask);
  test_memory();
  regard_mask_free(mask);
  regard_mask_free(NULL);
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
