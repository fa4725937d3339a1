/* The C API from a C11 program: numbers against naive loops, errors message by message, old sizes.
 *
 * Prints "N passed, 0 failed"; exits 1 when a check failed. */
#include <math.h>
#include <regard/regard.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

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

/* ------------------------------------------------------------------------------ a small problem */

enum { B = 2, HQ = 4, HKV = 2, SQ = 5, SK = 7, D = 3, DV = 2 };

static float q[B][HQ][SQ][D], k[B][HKV][SK][D], v[B][HKV][SK][DV];
static float dout[B][HQ][SQ][DV];
static float out[B][HQ][SQ][DV], lse[B][HQ][SQ];
static float dq[B][HQ][SQ][D], dk[B][HKV][SK][D], dv[B][HKV][SK][DV];

#define DENSE(array, ...) dense(array, REGARD_F32, (const int64_t[]){__VA_ARGS__, -1})

static regard_tensor dense(const void* data, regard_type type, const int64_t* sizes) {
  int32_t rank = 0;
  while (sizes[rank] >= 0) ++rank;
  return regard_dense(data, type, rank, sizes);
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
  a.q = DENSE(q, B, HQ, SQ, D);
  a.k = DENSE(k, B, HKV, SK, D);
  a.v = DENSE(v, B, HKV, SK, DV);
  a.causal = REGARD_CAUSAL_BOTTOM_RIGHT;
  a.has_scale = 1;
  a.scale = 0.75;
  return a;
}

static regard_forward_tensors outputs(void) {
  regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
  tensors.out = DENSE(out, B, HQ, SQ, DV);
  tensors.lse = DENSE(lse, B, HQ, SQ);
  return tensors;
}

static regard_backward_tensors gradients(void) {
  regard_backward_tensors tensors = REGARD_BACKWARD_TENSORS_INIT;
  tensors.out = DENSE(out, B, HQ, SQ, DV);
  tensors.lse = DENSE(lse, B, HQ, SQ);
  tensors.dout = DENSE(dout, B, HQ, SQ, DV);
  tensors.dq = DENSE(dq, B, HQ, SQ, D);
  tensors.dk = DENSE(dk, B, HKV, SK, D);
  tensors.dv = DENSE(dv, B, HKV, SK, DV);
  return tensors;
}

static int near(const void* got, const double* want, size_t count) {
  const float* values = got;
  for (size_t i = 0; i < count; ++i) {
    if (!(fabs(values[i] - want[i]) <= 2e-6 * (1 + fabs(want[i])))) {
      printf("  element %zu is %g, not %g\n", i, values[i], want[i]);
      return 0;
    }
  }
  return 1;
}

static void test_numbers(void) {
  static double want_out[B][HQ][SQ][DV], want_lse[B][HQ][SQ];
  static double want_dq[B][HQ][SQ][D], want_dk[B][HKV][SK][D], want_dv[B][HKV][SK][DV];
  const double scale = 0.75;
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < HQ; ++h) {
      const int g = h / (HQ / HKV);
      for (int i = 0; i < SQ; ++i) {
        double p[SK], total = 0, delta = 0;
        const int seen = i + SK - SQ + 1;
        for (int j = 0; j < seen; ++j) {
          double score = 0;
          for (int d = 0; d < D; ++d) score += (double)q[b][h][i][d] * k[b][g][j][d];
          total += p[j] = exp(scale * score);
        }
        want_lse[b][h][i] = log(total);
        for (int j = 0; j < seen; ++j) {
          p[j] /= total;
          for (int d = 0; d < DV; ++d) want_out[b][h][i][d] += p[j] * v[b][g][j][d];
        }
        for (int d = 0; d < DV; ++d) delta += dout[b][h][i][d] * want_out[b][h][i][d];
        for (int j = 0; j < seen; ++j) {
          double dp = 0;
          for (int d = 0; d < DV; ++d) {
            dp += (double)dout[b][h][i][d] * v[b][g][j][d];
            want_dv[b][g][j][d] += p[j] * dout[b][h][i][d];
          }
          for (int d = 0; d < D; ++d) {
            want_dq[b][h][i][d] += scale * p[j] * (dp - delta) * k[b][g][j][d];
            want_dk[b][g][j][d] += scale * p[j] * (dp - delta) * q[b][h][i][d];
          }
        }
      }
    }
  }
  const regard_attention a = problem();
  const regard_forward_tensors to = outputs();
  CHECK(regard_forward(&a, &to, NULL) == REGARD_OK);
  CHECK(near(out, &want_out[0][0][0][0], sizeof(out) / sizeof(float)));
  CHECK(near(lse, &want_lse[0][0][0], sizeof(lse) / sizeof(float)));
  const regard_backward_tensors back = gradients();
  CHECK(regard_backward(&a, &back, NULL) == REGARD_OK);
  CHECK(near(dq, &want_dq[0][0][0][0], sizeof(dq) / sizeof(float)));
  CHECK(near(dk, &want_dk[0][0][0][0], sizeof(dk) / sizeof(float)));
  CHECK(near(dv, &want_dv[0][0][0][0], sizeof(dv) / sizeof(float)));

  /* Every backend for the memory of this machine, and the gradients doubled by accumulation. */
  for (int32_t index = 0; index < regard_backend_count(); ++index) {
    regard_run run = REGARD_RUN_INIT;
    run.backend = regard_backend_name(index);
    run.threads = 2;
    if (!regard_backend_available(index) || strncmp(run.backend, "cuda", 4) == 0) continue;
    CHECK(regard_forward(&a, &to, &run) == REGARD_OK);
    CHECK(near(out, &want_out[0][0][0][0], sizeof(out) / sizeof(float)));
    CHECK(regard_backward(&a, &back, &run) == REGARD_OK);
    CHECK(near(dv, &want_dv[0][0][0][0], sizeof(dv) / sizeof(float)));
  }
  regard_backward_tensors more = gradients();
  more.accumulate = 1;
  double* doubled = &want_dk[0][0][0][0];
  for (size_t i = 0; i < sizeof(dk) / sizeof(float); ++i) doubled[i] *= 2;
  CHECK(regard_backward(&a, &more, NULL) == REGARD_OK);
  CHECK(near(dk, doubled, sizeof(dk) / sizeof(float)));
}

/* ---------------------------------------------------------------------------------------- errors
 */

static void expect_at(int line, regard_status status, const char* argument, const char* value,
                      const char* reason) {
  char start[512];
  snprintf(start, sizeof(start), "%s = %s: %s", argument, value, reason);
  check_at(line, status == REGARD_INVALID_ARGUMENT, "status is invalid_argument");
  check_at(line, strcmp(regard_last_error_argument(), argument) == 0, argument);
  check_at(line, strcmp(regard_last_error_value(), value) == 0, value);
  check_at(line, strncmp(regard_last_error(), start, strlen(start)) == 0, start);
}
#define EXPECT(call, argument, value, reason) expect_at(__LINE__, call, argument, value, reason)

static void test_errors(void) {
  const regard_attention good = problem();
  const regard_forward_tensors to = outputs();
  const regard_backward_tensors back = gradients();
  regard_attention a;
  size_t bytes = 0;
  double realised = 0;

  EXPECT(regard_forward(NULL, &to, NULL), "attention", "null", "must be given");
  EXPECT(regard_forward(&good, NULL, NULL), "tensors", "null", "must be given");
  EXPECT(regard_backward(NULL, &back, NULL), "attention", "null", "must be given");
  EXPECT(regard_backward(&good, NULL, NULL), "tensors", "null", "must be given");
  EXPECT(regard_workspace(&good, 0, NULL, NULL), "bytes", "null", "must be given");
  EXPECT(regard_workspace(NULL, 0, NULL, &bytes), "attention", "null", "must be given");
  EXPECT(regard_workspace(&good, 2, NULL, &bytes), "pass", "2", "must be 0 to 1");
  EXPECT(regard_dropout_mask(&good, NULL), "keep", "null", "must be given");
  EXPECT(regard_dropout_probability(0.5, NULL), "realised", "null", "must be given");
  EXPECT(regard_explain(&good, 0, NULL, NULL, NULL, 9, NULL), "text", "null",
         "must be given where capacity > 0");

  static const size_t wrong_sizes[] = {
      0, 8, 247, 249, 256, 304, 980, 1148, sizeof(regard_attention) + 8, (size_t)-8};
  for (size_t i = 0; i < sizeof(wrong_sizes) / sizeof(size_t); ++i) {
    char value[32];
    snprintf(value, sizeof(value), "%zu", wrong_sizes[i]);
    a = good;
    a.size = wrong_sizes[i];
    EXPECT(regard_forward(&a, &to, NULL), "attention.size", value, "must be sizeof the struct");
  }
  regard_forward_tensors small = to;
  small.size = 80;
  EXPECT(regard_forward(&good, &small, NULL), "tensors.size", "80", "must be sizeof the struct");
  small.size = offsetof(regard_forward_tensors, lse) + 16; /* in the middle of lse */
  EXPECT(regard_forward(&good, &small, NULL), "tensors.size", "104", "must be sizeof the struct");
  regard_run run = REGARD_RUN_INIT;
  run.size = 112;
  EXPECT(regard_forward(&good, &to, &run), "run.size", "112", "must be sizeof the struct");
  regard_explanation numbers = REGARD_EXPLANATION_INIT;
  numbers.size = 0;
  EXPECT(regard_explain(&good, 0, NULL, &numbers, NULL, 0, NULL), "numbers.size", "0",
         "must be sizeof the struct");

  run = (regard_run)REGARD_RUN_INIT;
  run.gradients_follow = 2;
  EXPECT(regard_forward(&good, &to, &run), "gradients_follow", "2", "must be 0 or 1");
  run = (regard_run)REGARD_RUN_INIT;
  run.reserved = 1;
  EXPECT(regard_forward(&good, &to, &run), "run.reserved", "1", "must be 0");
  a = good;
  a.continue_from = 2;
  EXPECT(regard_forward(&a, &to, NULL), "continue_from", "2", "must be 0 or 1");
  a = good;
  a.reserved = 3;
  EXPECT(regard_forward(&a, &to, NULL), "attention.reserved", "3", "must be 0");
  run = (regard_run)REGARD_RUN_INIT;
  run.device = 3;
  EXPECT(regard_forward(&good, &to, &run), "device", "3", "must be 0 to 2");
  run.device = REGARD_DEVICE_CUDA;
  run.device_index = -3;
  EXPECT(regard_forward(&good, &to, &run), "device", "cuda:-3", "must be a GPU from cuda(0) on");
  regard_backward_tensors reserved = back;
  reserved.reserved = -1;
  EXPECT(regard_backward(&good, &reserved, NULL), "tensors.reserved", "-1", "must be 0");

  /* Flags are 0 or 1. */
  a = good;
  a.has_scale = 2;
  EXPECT(regard_forward(&a, &to, NULL), "has_scale", "2", "must be 0 or 1");
  a = good;
  a.deterministic = -1;
  EXPECT(regard_forward(&a, &to, NULL), "deterministic", "-1", "must be 0 or 1");
  regard_backward_tensors sums = back;
  sums.accumulate = 256;
  EXPECT(regard_backward(&good, &sums, NULL), "accumulate", "256", "must be 0 or 1");

  /* Dense tensors of more elements than there are numbers for. */
  const int64_t huge[] = {3, INT32_MAX, INT32_MAX, INT32_MAX};
  a = good;
  a.q = regard_dense(NULL, REGARD_F32, 4, huge);
  CHECK(a.q.strides[1] == (int64_t)INT32_MAX * INT32_MAX && a.q.strides[0] == INT64_MAX);
  EXPECT(regard_workspace(&a, 0, NULL, &bytes), "q",
         "f32 [3, 2147483647, 2147483647, 2147483647] strides [9223372036854775807, "
         "4611686014132420609, 2147483647, 1]",
         "spans more memory than there is");

  /* Values that a narrower C++ enum would have cut to a valid one. */
  a = good;
  a.causal = 256;
  EXPECT(regard_forward(&a, &to, NULL), "causal", "256", "must be 0 to 2");
  a = good;
  a.precision = -1;
  EXPECT(regard_forward(&a, &to, NULL), "precision", "-1", "must be 0 to 2");
  a = good;
  a.bias.type = 258;
  EXPECT(regard_forward(&a, &to, NULL), "bias.type", "258", "must be 0 to 6");
  a = good;
  a.q.rank = -3;
  EXPECT(regard_forward(&a, &to, NULL), "q.rank", "-3", "must be 0 to 4");

  /* The library's own validation arrives as it is. */
  a = good;
  a.scale = NAN;
  EXPECT(regard_forward(&a, &to, NULL), "scale", "nan", "");
  a = good;
  a.dropout_p = 1;
  EXPECT(regard_forward(&a, &to, NULL), "dropout_p", "1", "");
  a = good;
  a.q.data = NULL;
  EXPECT(regard_forward(&a, &to, NULL), "q", "null", "");
  a = good;
  a.k.type = REGARD_BF16;
  EXPECT(regard_forward(&a, &to, NULL), "k", "bf16 [2, 2, 7, 3]", "");

  run = (regard_run)REGARD_RUN_INIT;
  run.backend = "abacus";
  CHECK(regard_forward(&good, &to, &run) != REGARD_OK);
  CHECK(strcmp(regard_last_error_argument(), "backend") == 0);
  CHECK(strcmp(regard_last_error_value(), "abacus") == 0);
  char name[3001] = {0};
  run.backend = memset(name, 'x', sizeof(name) - 1);
  CHECK(regard_forward(&good, &to, &run) == REGARD_UNAVAILABLE);
  CHECK(
      strstr(regard_last_error(), "xxx...: no backend has this name; \"regard info\" lists them"));
  CHECK(strlen(regard_last_error_value()) == 255);
  CHECK(strcmp(regard_last_error_value() + 250, "xx...") == 0);

  /* Success clears the error; nothing was written by the failures. */
  CHECK(regard_dropout_probability(0.1, &realised) == REGARD_OK);
  CHECK(fabs(realised - 6554.0 / 65536) < 1e-15);
  CHECK(strcmp(regard_last_error(), "") == 0 && strcmp(regard_last_error_value(), "") == 0);
  memset(out, 0x5a, sizeof(out));
  CHECK(regard_forward(&a, &to, NULL) == REGARD_INVALID_ARGUMENT);
  const unsigned char* bytes_of_out = (const unsigned char*)out;
  size_t untouched = 0;
  while (untouched < sizeof(out) && bytes_of_out[untouched] == 0x5a) ++untouched;
  CHECK(untouched == sizeof(out));
}

static int fails_elsewhere(void* ignored) {
  (void)ignored;
  const int clean = strcmp(regard_last_error(), "") == 0;
  return clean && regard_forward(NULL, NULL, NULL) == REGARD_INVALID_ARGUMENT &&
         strcmp(regard_last_error_argument(), "attention") == 0;
}

static void test_error_is_per_thread(void) {
  const regard_attention good = problem();
  thrd_t other;
  int result = 0;
  CHECK(regard_forward(&good, NULL, NULL) == REGARD_INVALID_ARGUMENT);
  CHECK(thrd_create(&other, fails_elsewhere, NULL) == thrd_success);
  CHECK(thrd_join(other, &result) == thrd_success);
  CHECK(result == 1);
  CHECK(strcmp(regard_last_error_argument(), "tensors") == 0);
}

/* -------------------------------------------------------------------------------------- versions
 */

static void test_older_callers(void) {
  const regard_forward_tensors to = outputs();
  float want[sizeof(out) / sizeof(float)];
  regard_attention a = problem();
  a.has_scale = 0;
  a.causal = REGARD_CAUSAL_NONE;
  CHECK(regard_forward(&a, &to, NULL) == REGARD_OK);
  memcpy(want, out, sizeof(out));

  /* What lies past the caller's size is not looked at. */
  static const size_t sizes[] = {
      offsetof(regard_attention, bias),         offsetof(regard_attention, mask),
      offsetof(regard_attention, scale),        offsetof(regard_attention, window_left),
      offsetof(regard_attention, has_scale),    offsetof(regard_attention, visible),
      offsetof(regard_attention, continue_from)};
  for (size_t i = 0; i < sizeof(sizes) / sizeof(size_t); ++i) {
    regard_attention older = a;
    memset((char*)&older + sizes[i], 0x77, sizeof(older) - sizes[i]);
    older.size = sizes[i];
    memset(out, 0, sizeof(out));
    CHECK(regard_forward(&older, &to, NULL) == REGARD_OK);
    CHECK(memcmp(want, out, sizeof(out)) == 0);
  }
  regard_forward_tensors only_out = to;
  only_out.size = offsetof(regard_forward_tensors, lse);
  memset(&only_out.lse, 0x77, sizeof(only_out.lse));
  CHECK(regard_forward(&a, &only_out, NULL) == REGARD_OK);
  regard_run run;
  memset(&run, 0x77, sizeof(run));
  run.size = offsetof(regard_run, device);
  CHECK(regard_forward(&a, &to, &run) == REGARD_OK);

  regard_explanation numbers;
  memset(&numbers, 0x77, sizeof(numbers));
  numbers.size = offsetof(regard_explanation, backend);
  CHECK(regard_explain(&a, REGARD_PASS_FORWARD, NULL, &numbers, NULL, 0, NULL) == REGARD_OK);
  CHECK(numbers.size == offsetof(regard_explanation, backend));
  CHECK(numbers.backend[0] == 0x77 && numbers.kernel[255] == 0x77);
}

/* --------------------------------------------------------------------------- explain, executors */

static void test_explain(void) {
  regard_attention a = problem();
  a.q.data = a.k.data = a.v.data = NULL; /* shapes are enough */
  regard_explanation numbers = REGARD_EXPLANATION_INIT;
  size_t needed = 0, bytes = 0;
  CHECK(regard_explain(&a, REGARD_PASS_FORWARD, NULL, &numbers, NULL, 0, &needed) == REGARD_OK);
  CHECK(needed > 1 && numbers.supported == 1);
  /* Causal from the bottom right: row i sees i + 3 keys, 25 pairs of 35. */
  CHECK(numbers.pairs == B * HQ * 25);
  CHECK(numbers.flops == 2.0 * (D + DV) * numbers.pairs);
  CHECK(strlen(numbers.backend) > 0 && strlen(numbers.kernel) > 0);
  CHECK(regard_workspace(&a, REGARD_PASS_FORWARD, NULL, &bytes) == REGARD_OK);
  CHECK(bytes == numbers.workspace);
  CHECK(regard_explain(&a, REGARD_PASS_BACKWARD, NULL, &numbers, NULL, 0, NULL) == REGARD_OK);
  CHECK(numbers.flops == 2.0 * (3 * D + 2 * DV) * numbers.pairs);

  char* text = malloc(needed + 1);
  text[needed] = 0x5a;
  CHECK(regard_explain(&a, REGARD_PASS_FORWARD, NULL, NULL, text, needed, NULL) == REGARD_OK);
  CHECK(strlen(text) == needed - 1 && text[needed - 2] == '\n' && text[needed] == 0x5a);
  char cut[9];
  memset(cut, 0x5a, sizeof(cut));
  size_t again = 0;
  CHECK(regard_explain(&a, REGARD_PASS_FORWARD, NULL, NULL, cut, 8, &again) == REGARD_OK);
  CHECK(again == needed && strlen(cut) == 7 && memcmp(cut, text, 7) == 0 && cut[8] == 0x5a);
  free(text);
}

static int executed = 0;
static void run_backwards(void* self, int tasks, void (*task)(void* context, int index),
                          void* context) {
  *(int*)self += tasks;
  for (int index = tasks - 1; index >= 0; --index) task(context, index);
}

static void test_executor_and_workspace(void) {
  const regard_attention a = problem();
  const regard_forward_tensors to = outputs();
  const regard_backward_tensors back = gradients();
  float want_out[sizeof(out) / sizeof(float)], want_dk[sizeof(dk) / sizeof(float)];
  CHECK(regard_forward(&a, &to, NULL) == REGARD_OK);
  CHECK(regard_backward(&a, &back, NULL) == REGARD_OK);
  memcpy(want_out, out, sizeof(out));
  memcpy(want_dk, dk, sizeof(dk));
  regard_run run = REGARD_RUN_INIT;
  run.executor = run_backwards;
  run.executor_self = &executed;
  run.threads = 3;
  CHECK(regard_workspace(&a, REGARD_PASS_BACKWARD, &run, &run.workspace_size) == REGARD_OK);
  size_t forward_size = 0;
  CHECK(regard_workspace(&a, REGARD_PASS_FORWARD, &run, &forward_size) == REGARD_OK);
  if (run.workspace_size < forward_size) run.workspace_size = forward_size;
  void* memory = run.workspace_size ? malloc(run.workspace_size) : NULL;
  run.workspace = memory;
  memset(out, 0, sizeof(out));
  memset(dk, 0, sizeof(dk));
  CHECK(regard_forward(&a, &to, &run) == REGARD_OK);
  CHECK(regard_backward(&a, &back, &run) == REGARD_OK);
  CHECK(memcmp(out, want_out, sizeof(out)) == 0);
  CHECK(memcmp(dk, want_dk, sizeof(dk)) == 0);
  CHECK(executed > 0);
  free(memory);
}

static void test_dropout_mask(void) {
  static unsigned char keep[B][HQ][SQ][SK];
  regard_attention a = problem();
  a.dropout_p = 0.5;
  a.dropout_seed = 7;
  a.q.data = a.k.data = a.v.data = NULL;
  const regard_tensor to = dense(keep, REGARD_BOOL, (const int64_t[]){B, HQ, SQ, SK, -1});
  CHECK(regard_dropout_mask(&a, &to) == REGARD_OK);
  int kept = 0;
  for (size_t i = 0; i < sizeof(keep); ++i) kept += (&keep[0][0][0][0])[i];
  CHECK(kept > (int)sizeof(keep) * 2 / 5 && kept < (int)sizeof(keep) * 3 / 5);

  /* The same seed in memory, which a program built with an older header has no field for. */
  static unsigned char again[B][HQ][SQ][SK];
  const regard_tensor to_again = dense(again, REGARD_BOOL, (const int64_t[]){B, HQ, SQ, SK, -1});
  const uint32_t words[] = {7, 0};
  a.dropout_seed = 8;
  a.dropout_seed_words = words;
  CHECK(regard_dropout_mask(&a, &to_again) == REGARD_OK);
  CHECK(memcmp(keep, again, sizeof(keep)) == 0);
  a.size = offsetof(regard_attention, dropout_seed_words);
  CHECK(regard_dropout_mask(&a, &to_again) == REGARD_OK);
  CHECK(memcmp(keep, again, sizeof(keep)) != 0);
}

static void test_names(void) {
  CHECK(strcmp(regard_version(), "0.2.0") == 0);
  CHECK(strcmp(regard_status_name(REGARD_OK), "ok") == 0);
  CHECK(strcmp(regard_status_name(REGARD_INVALID_ARGUMENT), "invalid_argument") == 0);
  CHECK(strcmp(regard_status_name(REGARD_INTERNAL), "internal") == 0);
  CHECK(strcmp(regard_status_name(-1), "unknown") == 0);
  CHECK(strcmp(regard_status_name(REGARD_DEVICE_FAILURE), "device_failure") == 0);
  CHECK(strcmp(regard_status_name(7), "unknown") == 0);
  CHECK(regard_backend_count() >= 1);
  int reference = 0;
  for (int32_t index = 0; index < regard_backend_count(); ++index) {
    CHECK(strlen(regard_backend_name(index)) > 0 && strlen(regard_backend_note(index)) > 0);
    CHECK(regard_backend_available(index) == 0 || regard_backend_available(index) == 1);
    reference += strcmp(regard_backend_name(index), "reference") == 0;
  }
  CHECK(reference == 1);
  CHECK(!regard_backend_name(-1) && !regard_backend_note(regard_backend_count()));
  CHECK(!regard_backend_available(regard_backend_count()));
}

int main(void) {
  fill(q, sizeof(q), 1);
  fill(k, sizeof(k), 2);
  fill(v, sizeof(v), 3);
  fill(dout, sizeof(dout), 4);
  test_names();
  test_numbers();
  test_errors();
  test_error_is_per_thread();
  test_older_callers();
  test_explain();
  test_executor_and_workspace();
  test_dropout_mask();
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
