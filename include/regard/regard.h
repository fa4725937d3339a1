/** \file
 * Exact scaled dot product attention, forward and backward: the whole C API.
 *
 * One value, regard_attention, says what is computed; regard_forward, regard_backward,
 * regard_workspace and regard_explain all take it. What each field means, to the last edge, stands
 * in docs/semantics.md. Valid C11 and C++20.
 *
 *     regard_attention a = REGARD_ATTENTION_INIT;
 *     a.q = regard_dense(q, REGARD_F32, 4, (const int64_t[]){B, Hq, Sq, D});
 *     ... k and v likewise; every other field may keep its default, which is "off" ...
 *     regard_forward_tensors tensors = REGARD_FORWARD_TENSORS_INIT;
 *     tensors.out = regard_dense(out, REGARD_F32, 4, (const int64_t[]){B, Hq, Sq, Dv});
 *     if (regard_forward(&a, &tensors, NULL) != REGARD_OK) puts(regard_last_error());
 *
 * Versions. Every struct that may grow begins with `size`, the caller's own sizeof; the INIT macros
 * set it. A field that lies past the caller's size has its default, so that a program built against
 * an older header stays right. A size that is larger than the library knows is refused. Callers
 * without the macros (other languages): zero the struct, set size, and set both windows to -1.
 *
 * Errors. Functions that return a regard_status never throw or exit, and print nothing except what
 * regard_show_compiling says. On an error nothing was written to any output (docs/guide-cpp.md
 * names three exceptions), and regard_last_error() of the same thread says what was wrong, until
 * its next call.
 *
 * Memory. No element of an output may share memory with an element of another output or of an
 * input, tables of sequences included; a call in which one does is refused. Elements may lie
 * between one another: dq, dk and dv may be slices of one buffer. Inputs may overlap. The workspace
 * and the memory of a mask must not share memory with any tensor, which is not checked. Tables of
 * sequences are read once on the CPU; on a GPU they must not change before the call's work is done.
 *
 * Threads. Every function may be called from any number of threads at once. A thread that is
 * cancelled (pthread_cancel) in a call ends after it.
 */
#ifndef REGARD_REGARD_H
#define REGARD_REGARD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define REGARD_API __attribute__((visibility("default")))
#else
#define REGARD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------- constants
 * The types are int32_t, not enums: one size under every compiler, and a wrong value is an error
 * that is reported instead of undefined behaviour. */

/** What a call returns: REGARD_OK or why not. */
typedef int32_t regard_status;
enum {
  REGARD_OK = 0,               /**< every output was written or, on a GPU, put on the stream */
  REGARD_INVALID_ARGUMENT = 1, /**< an argument breaks a rule of docs/semantics.md */
  REGARD_UNSUPPORTED = 2,      /**< well formed, but the chosen backend cannot do it */
  REGARD_UNAVAILABLE = 3,      /**< the backend or device is not on this machine */
  REGARD_OUT_OF_MEMORY = 4,    /**< memory could not be allocated */
  REGARD_INTERNAL = 5,         /**< a bug of this library */
  REGARD_DEVICE_FAILURE = 6    /**< the GPU's driver reported a failure; the text quotes it */
};

/** What one element of a tensor is. */
typedef int32_t regard_type;
enum {
  REGARD_NONE = 0, /**< a tensor of this type is not given */
  REGARD_F64 = 1,
  REGARD_F32 = 2,
  REGARD_F16 = 3,  /**< IEEE binary16 */
  REGARD_BF16 = 4, /**< the upper half of an f32 */
  REGARD_BOOL = 5, /**< one byte; 0 is false, anything else true */
  REGARD_I32 = 6
};

/** Query i sees keys j <= i (top left) or j <= i + Sk - Sq (bottom right). */
typedef int32_t regard_causal;
enum { REGARD_CAUSAL_NONE = 0, REGARD_CAUSAL_TOP_LEFT = 1, REGARD_CAUSAL_BOTTOM_RIGHT = 2 };

/** How tensor cores may round f32 inputs; the CPU computes `full` whatever is asked. */
typedef int32_t regard_precision;
enum { REGARD_PRECISION_FULL = 0, REGARD_PRECISION_TF32 = 1, REGARD_PRECISION_BF16 = 2 };

/** Which of the two calls is meant. */
typedef int32_t regard_pass;
enum { REGARD_PASS_FORWARD = 0, REGARD_PASS_BACKWARD = 1 };

/** Where the tensors lie and the work is done. */
typedef int32_t regard_device;
enum { REGARD_DEVICE_CPU = 0, REGARD_DEVICE_CUDA = 1, REGARD_DEVICE_CHIP = 2 };

/* -------------------------------------------------------------------------------------- structs */

/** A view of memory that the caller owns. Sizes and strides count elements. All zero = "not given".
 * Inputs are only read, though the pointer is not const. */
typedef struct regard_tensor {
  void* data;         /**< the first element */
  regard_type type;   /**< REGARD_NONE = not given */
  int32_t rank;       /**< 0 to 4: how many sizes and strides count */
  int64_t sizes[4];   /**< elements */
  int64_t strides[4]; /**< elements from one index to the next */
} regard_tensor;

/** What mask, row_spans and key_spans show, as a value that many calls share. */
typedef struct regard_mask regard_mask;

/** B batches, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), Sq queries, Sk keys, head
 * sizes D and Dv. Packed sequences: q is (total_q, Hq, D), k and v (total_k, Hkv, D or Dv);
 * cu_seqlens_* and max_seqlen_* are given, and Sq, Sk below stand for the max_seqlen. */
typedef struct regard_attention {
  size_t size; /**< sizeof(regard_attention) */

  regard_tensor q; /**< (B, Hq, Sq, D)   f64, f32, f16, bf16; last stride 1 */
  regard_tensor k; /**< (B, Hkv, Sk, D)  q's type */
  regard_tensor v; /**< (B, Hkv, Sk, Dv) q's type */

  /** broadcasts to (B, Hq, Sq, Sk); f64, f32, f16, bf16; added to the scores */
  regard_tensor bias;
  regard_tensor mask; /**< broadcasts to (B, Hq, Sq, Sk); bool; true = the pair is visible */
  regard_tensor alibi_slopes; /**< (Hq) or (B, Hq); f32; score -= slope * |i + Sk - Sq - j| */
  regard_tensor sink;         /**< (Hq); f32; a logit that joins the denominator, without a value */

  regard_tensor cu_seqlens_q; /**< (B + 1); i32; where each packed sequence begins */
  regard_tensor cu_seqlens_k; /**< as cu_seqlens_q */
  regard_tensor seqused_q;    /**< (B); i32; how many rows of each sequence are real */
  regard_tensor seqused_k;    /**< as seqused_q */
  int64_t max_seqlen_q;       /**< packed only: of the longest sequence on, up to q's rows */
  int64_t max_seqlen_k;       /**< as max_seqlen_q */

  double scale;               /**< used when has_scale is set; otherwise 1 / sqrt(D) */
  double softcap;             /**< > 0: score = softcap * tanh(score / softcap), before the bias */
  double dropout_p;           /**< 0 <= p < 1; realised in steps of 1/65536 */
  uint64_t dropout_seed;      /**< dropout is a pure function of (seed, offset, b, h, i, j) */
  uint64_t dropout_offset;    /**< see dropout_seed */
  int64_t window_left;        /**< keys from diag - left on are visible; default -1 = unbounded */
  int64_t window_right;       /**< keys up to diag + right are visible; diag is i for causal top
                                 left, else i + Sk - Sq */
  int32_t has_scale;          /**< 0 or 1 */
  regard_causal causal;       /**< default REGARD_CAUSAL_NONE */
  regard_precision precision; /**< default REGARD_PRECISION_FULL */
  int32_t deterministic; /**< 0 or 1; 1: GPU gradients bitwise repeatable; the CPU's always are */
  /** Not null: the seed is these two words, the low one first, in memory of the call's device. A
   * GPU reads them when the call's kernels run; dropout_offset is then below 2^32. */
  const uint32_t* dropout_seed_words;

  /** Broadcasts to (B, Hq, Sq, 2 n), n from 1 to 8; i32; last stride 1. Row i sees the keys of its
   * n spans, each a begin and an end: begin <= j < end. Packed: (Hq or 1, total_q, 2 n); indices
   * count within the sequence. Any numbers are safe. */
  regard_tensor row_spans;
  /** Broadcasts to (B, Hq, Sk, 2 n): key j is seen by the rows of its n spans. Packed: (Hq or 1,
   * total_k, 2 n). */
  regard_tensor key_spans;

  /** The call has rows and keys of a longer sequence: row i stands at q_positions[i / 128] + i %
   * 128 there, key j at k_position + j. (ceil(Sq / 128)) or (B, ceil(Sq / 128)); i32; last stride
   * 1; not negative, and each at least 128 above the one before. Causal masks (top left only),
   * windows, ALiBi and dropout go by positions; bias, mask, spans and lengths by the call's own
   * indices. Not for packed sequences. Where neither q_positions nor k_position is given, a call is
   * no part: windows and ALiBi are then aligned by the ends of the sequences. So every part of a
   * sequence gives q_positions, also the one whose k_position is 0. */
  regard_tensor q_positions;
  int64_t k_position;  /**< of key 0; with dropout a multiple of 32; default 0 */
  int64_t batch_begin; /**< added to b where dropout counts it; default 0 */
  int64_t head_begin;  /**< added to h where dropout counts it; default 0 */

  /** instead of mask, row_spans and key_spans: what regard_mask_make made of them; default null */
  const regard_mask* visible;

  /** 0 or 1; 1: out (f32; f64 for f64) and lse hold a result over other keys, which the forward
   * pass replaces by the result over both sets. An lse of -inf is an empty set; then out may hold
   * anything. The backward pass is the same with and without it. Default 0 */
  int32_t continue_from;
  int32_t reserved; /**< 0 */
} regard_attention;

/** What regard_forward writes; with continue_from, what it reads first. */
typedef struct regard_forward_tensors {
  size_t size;       /**< sizeof(regard_forward_tensors) */
  regard_tensor out; /**< (B, Hq, Sq, Dv); q's type or f32. Packed: (total_q, Hq, Dv) */
  /** (B, Hq, Sq); f32 (f64 for f64); natural log; optional without continue_from. Packed: (Hq,
   * total_q) */
  regard_tensor lse;
} regard_forward_tensors;

/** What regard_backward reads next to the inputs, and what it writes. */
typedef struct regard_backward_tensors {
  size_t size; /**< sizeof(regard_backward_tensors) */

  /* Read. */
  regard_tensor out;  /**< as forward wrote it */
  regard_tensor lse;  /**< as forward wrote it */
  regard_tensor dout; /**< as out; q's type or f32 */
  regard_tensor dlse; /**< as lse; the gradient that arrives at the lse; optional */

  /* Written; each is optional, and what is not given is not computed. */
  regard_tensor dq; /**< as q; q's type or f32 */
  regard_tensor dk; /**< as k; q's type or f32 */
  regard_tensor dv; /**< as v; q's type or f32 */
  /** exactly bias's sizes (broadcast dimensions summed); bias's type or f32 */
  regard_tensor dbias;
  regard_tensor dsink; /**< (Hq); f32 */

  int32_t accumulate; /**< 0 or 1; 1: add to what the tensors hold instead of overwriting it */
  int32_t reserved;   /**< 0 */

  /** Read, as lse: dout . out - dlse of each row. Instead of out and dlse, for a caller whose calls
   * over different keys share one result. */
  regard_tensor delta;
} regard_backward_tensors;

/** A caller's thread pool: must call task(context, index) once for each index in [0, tasks), in any
 * order and on any threads, and return when all have returned. Anything else is an error of the
 * argument `executor`; the results are then incomplete. A call may run it several times, or not at
 * all. `self` is passed through. */
typedef void (*regard_executor)(void* self, int tasks, void (*task)(void* context, int index),
                                void* context);

/** A caller's allocator, for the workspace of a call without one: returns memory like
 * regard_run.workspace of at least `size` bytes, or null, which is REGARD_OUT_OF_MEMORY; so is a
 * C++ exception, whose text the error has. It is called at most once in a call, by the calling
 * thread, before anything is written. The memory must stay until the call has returned; on a GPU
 * until the stream gets there. `self` is passed through. */
typedef void* (*regard_allocator)(void* self, size_t size);

/** Where and how to run. A null pointer instead of a regard_run means all defaults. */
typedef struct regard_run {
  size_t size;                /**< sizeof(regard_run) */
  regard_device device;       /**< default REGARD_DEVICE_CPU */
  int32_t device_index;       /**< cuda: which GPU */
  const char* device_name;    /**< chip: "sm_80", for workspace, explain, prepare; null = "" */
  void* stream;               /**< GPU: the CUstream to run on; null = the default stream */
  void* workspace;            /**< null: the library's own; GPU: device memory, 256-byte aligned */
  size_t workspace_size;      /**< bytes; at least what regard_workspace says */
  regard_executor executor;   /**< CPU; null = the library's own pool */
  void* executor_self;        /**< what the executor gets as `self` */
  const char* backend;        /**< null or "" = choose; or a name from regard_backend_name */
  int32_t threads;            /**< CPU: up to 4096; 0 = every core that the caller may use */
  int32_t gradients_follow;   /**< 0 or 1; GPU: compile backward's kernels next to forward's */
  regard_allocator allocator; /**< used where `workspace` is null; null = the library's own */
  void* allocator_self;       /**< what the allocator gets as `self` */
  /** GPU: how many multiprocessors kernels may occupy; 0 = all. regard_explain says which kernels
   * the limit does not hold for. Changes no result beyond rounding. */
  int32_t multiprocessors;
  int32_t reserved; /**< 0 */
} regard_run;

/** What regard_explain says in numbers. The strings end with a zero and are cut where too long. */
typedef struct regard_explanation {
  size_t size;       /**< sizeof(regard_explanation), set by the caller */
  int32_t supported; /**< 0 or 1 */
  int32_t reserved;  /**< 0 */
  size_t workspace;  /**< bytes */
  /** (query, key) pairs that the intervals leave visible, over B and Hq; all of them where
   * positions lie in a GPU's memory */
  double pairs;
  double flops;     /**< 2 (D + Dv) per pair forward, 2 (3 D + 2 Dv) backward */
  char backend[64]; /**< "cpu:avx512" */
  char kernel[256]; /**< the configuration in one line */
} regard_explanation;

/* Initialisers: size and defaults. In C++ they are expressions, in C braced lists. */
#ifdef __cplusplus
#define REGARD_ATTENTION_INIT (regard_attention_initial())
#define REGARD_FORWARD_TENSORS_INIT (regard_forward_tensors_initial())
#define REGARD_BACKWARD_TENSORS_INIT (regard_backward_tensors_initial())
#define REGARD_RUN_INIT (regard_run_initial())
#define REGARD_EXPLANATION_INIT (regard_explanation_initial())
static inline regard_attention regard_attention_initial() {
  regard_attention value = {};
  value.size = sizeof(value);
  value.window_left = value.window_right = -1;
  return value;
}
static inline regard_forward_tensors regard_forward_tensors_initial() {
  regard_forward_tensors value = {};
  value.size = sizeof(value);
  return value;
}
static inline regard_backward_tensors regard_backward_tensors_initial() {
  regard_backward_tensors value = {};
  value.size = sizeof(value);
  return value;
}
static inline regard_run regard_run_initial() {
  regard_run value = {};
  value.size = sizeof(value);
  return value;
}
static inline regard_explanation regard_explanation_initial() {
  regard_explanation value = {};
  value.size = sizeof(value);
  return value;
}
#else
#define REGARD_ATTENTION_INIT \
  { .size = sizeof(regard_attention), .window_left = -1, .window_right = -1 }
#define REGARD_FORWARD_TENSORS_INIT \
  { .size = sizeof(regard_forward_tensors) }
#define REGARD_BACKWARD_TENSORS_INIT \
  { .size = sizeof(regard_backward_tensors) }
#define REGARD_RUN_INIT \
  { .size = sizeof(regard_run) }
#define REGARD_EXPLANATION_INIT \
  { .size = sizeof(regard_explanation) }
#endif

/** A tensor that is dense in row-major order. A rank outside 0 to 4 gives a tensor that every
 * function refuses, as do sizes of more elements than an int64_t counts. */
static inline regard_tensor regard_dense(const void* data, regard_type type, int32_t rank,
                                         const int64_t* sizes) {
  regard_tensor tensor = {0, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0}};
  int64_t stride = 1;
  int32_t axis;
  tensor.data = (void*)(uintptr_t)data;
  tensor.type = type;
  tensor.rank = rank;
  for (axis = (rank < 4 ? rank : 4) - 1; axis >= 0; --axis) {
    tensor.sizes[axis] = sizes[axis];
    tensor.strides[axis] = stride;
    if (sizes[axis] > 0)
      stride = stride > INT64_MAX / sizes[axis] ? INT64_MAX : stride * sizes[axis];
  }
  return tensor;
}

/* ------------------------------------------------------------------------------------ functions */

/** Computes out and, where given, lse. On the CPU, blocks until they are written. On a GPU, all
 * tensors lie in memory that the device reaches; the work is put on the stream, and the call
 * returns without synchronising. The first call of a kind compiles its kernels, about a second.
 * Errors: REGARD_INVALID_ARGUMENT, _UNSUPPORTED, _UNAVAILABLE, _OUT_OF_MEMORY, _DEVICE_FAILURE. */
REGARD_API regard_status regard_forward(const regard_attention* attention,
                                        const regard_forward_tensors* tensors,
                                        const regard_run* run);

/** Computes the gradients that are given, as regard_forward does. Errors as forward. */
REGARD_API regard_status regard_backward(const regard_attention* attention,
                                         const regard_backward_tensors* tensors,
                                         const regard_run* run);

/** Sets *bytes to what regard_run::workspace must hold. The tensors' data may be null here. */
REGARD_API regard_status regard_workspace(const regard_attention* attention, regard_pass pass,
                                          const regard_run* run, size_t* bytes);

/** Sets *bytes to what the memory of regard_mask_make must hold for such calls: the tile maps of
 * both passes. For a dense mask they are an eighth of its bytes a pass, with tiles of few
 * columns up to all of them. 0 on the CPU, and where no kernel reads a map. The tensors' data may
 * be null here.
 */
REGARD_API regard_status regard_mask_memory(const regard_attention* attention,
                                            const regard_run* run, size_t* bytes);

/** Sets *mask to a value of mask, row_spans and key_spans, of which one at least is given, for the
 * calls of many layers: regard_attention::visible. It serves calls on the same device, with the
 * same B, Hq, Sq, Sk and packing; others are REGARD_INVALID_ARGUMENT. Results are those of the
 * tensors. On a GPU, the kernels that make tile maps of a mask are put on the stream here, once for
 * both passes, and calls whose tiles, intervals and sequence tables are those of `attention` launch
 * none; on another stream they must be ordered behind this function's.
 *
 * memory: on a GPU, device memory of memory_size bytes, at least what regard_mask_memory says,
 * aligned to 256 bytes; may be null where it takes none. It, the memory of mask and spans, and on a
 * GPU that of sequence tables, are kept by reference: they must stay, and must not change, until
 * the work of the last call with the value is done. The data of other tensors may be null.
 * On an error *mask stays as it is. */
REGARD_API regard_status regard_mask_make(const regard_attention* attention, void* memory,
                                          size_t memory_size, const regard_run* run,
                                          regard_mask** mask);

/** Frees the value, after the last call that takes it has returned; null is allowed. The caller's
 * memory stays the caller's. */
REGARD_API void regard_mask_free(regard_mask* mask);

/** Which kernel runs, on what tiling and why. The tensors' data may be null here.
 * numbers (optional): the explanation in numbers; set its size first.
 * text (optional): receives the explanation for a person, as much as fits into capacity bytes, and
 * a terminating zero whenever capacity > 0.
 * needed (optional): the capacity that the whole text takes, with its zero.
 * A problem that is well formed but unsupported is REGARD_OK with numbers->supported = 0. */
REGARD_API regard_status regard_explain(const regard_attention* attention, regard_pass pass,
                                        const regard_run* run, regard_explanation* numbers,
                                        char* text, size_t capacity, size_t* needed);

/** Compiles the kernels that such a call needs, or finds them, so that the call itself will not
 * wait. The device may be a chip; on the CPU there is nothing to do. The tensors' data may be null
 * here; every output and gradient is taken to be wanted, in the inputs' own types. */
REGARD_API regard_status regard_prepare(const regard_attention* attention, regard_pass pass,
                                        const regard_run* run);

/** 0: from now on, a GPU call whose kernels are not cached is REGARD_UNAVAILABLE, and the error
 * names the missing kernel. 1 (the default): they are compiled. */
REGARD_API void regard_allow_compilation(int32_t allowed);

/** Switched off (0), a call that waits for over two seconds while its GPU kernels are compiled
 * shows no line on stderr, which it else does where that is a terminal. */
REGARD_API void regard_show_compiling(int32_t shown);

/** Gives back the GPU memory that the library keeps for the workspaces of later calls: of the
 * device with this index, in the current context if it belongs to the device, else in its primary
 * one. */
REGARD_API regard_status regard_trim_memory(int32_t device);

/** Writes the mask that dropout applies: keep is (B, Hq, Sq, Sk), bool, true = kept. q, k and v
 * need no data; packed sequences use their own row and column numbers. */
REGARD_API regard_status regard_dropout_mask(const regard_attention* attention,
                                             const regard_tensor* keep);

/** Sets *realised to the probability that dropout realises for p: the nearest multiple of 1/65536
 * below 1.
 * Errors: REGARD_INVALID_ARGUMENT for a p outside [0, 1). */
REGARD_API regard_status regard_dropout_probability(double p, double* realised);

/** How many backends this library has, best first within a device: the functions below take an
 * index from 0 to count - 1. Outside it name and note are null and available is 0. The strings live
 * as long as the process. */
REGARD_API int32_t regard_backend_count(void);
REGARD_API const char* regard_backend_name(int32_t index);  /**< what regard_run::backend takes */
REGARD_API int32_t regard_backend_available(int32_t index); /**< 1 = usable on this machine */
REGARD_API const char* regard_backend_note(int32_t index);  /**< what it is, or how to get it */

/** "0.2.0". */
REGARD_API const char* regard_version(void);

/** "ok", "invalid_argument", ...; "unknown" for a value that is no status. */
REGARD_API const char* regard_status_name(regard_status status);

/** About the last call of this thread that returned a regard_status: "argument = value: reason" and
 * its first two parts; all are "" after REGARD_OK. Long values end with "...". Valid until this
 * thread's next such call. */
REGARD_API const char* regard_last_error(void);
REGARD_API const char* regard_last_error_argument(void); /**< "scale"; see regard_last_error */
REGARD_API const char* regard_last_error_value(void);    /**< "nan"; see regard_last_error */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* REGARD_REGARD_H */
