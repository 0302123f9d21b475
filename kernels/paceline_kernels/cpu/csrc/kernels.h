// What each instruction set's kernels offer, as one table of functions over plain memory. No torch here.
#pragma once

#include <cstdint>

namespace paceline {

// Float panels hold 32 outputs, integer ones 16: [n / width][k][width], so that a panel is read from front to back.
constexpr int kFloatPanel = 32;
constexpr int kIntPanel = 16;
// Integer products take their inputs in steps of one AMX tile row.
constexpr int kDepth = 64;
constexpr int kTileRows = 16;
// Inputs that share a scale in q4 and q8, as in GGUF's Q4_0, Q4_1 and Q8_0.
constexpr int kGroup = 32;

enum class Kind : int { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, q4 = 4, q8 = 5 };

// A packed weight [n, k]. A number of
//   int8 (`data` [n/16][kp/4][16][4]) is value · scale of its output; `sums` [np] are of each output's values
//   q4 (`data` [n/16][k/32][4][16][4], input 4v + j of a group in the low half of byte [v][·][j], input 16 + 4v + j in the
//       high half) is value · scale + minimum, `groups` [n/16][k/32][2][16] float16 are both
//   q8 (`data` [n/16][k/32][8][16][4], values + 128) is value · scale, `groups` [n/16][k/32][16] float16
// q4 and q8 are padded to whole float panels.
struct Matrix {
  Kind kind = Kind::f32;
  int n = 0;
  int k = 0;
  int kp = 0;  // k rounded up to kDepth for int8
  const void* data = nullptr;
  const float* scales = nullptr;
  const int32_t* sums = nullptr;
  const uint16_t* groups = nullptr;
  const float* bias = nullptr;
  bool tame = true;  // every number is below 2^32: see `Tiles`

  bool integer() const { return kind == Kind::int8; }
  bool grouped() const { return kind == Kind::q4 || kind == Kind::q8; }
  int panel() const { return integer() || grouped() ? kIntPanel : kFloatPanel; }
  int panels() const { return (n + panel() - 1) / panel(); }
  int parts() const { return kind == Kind::f32 ? 3 : kind == Kind::f16 ? 2 : 1; }
  int float_panels() const { return (n + kFloatPanel - 1) / kFloatPanel; }
};

// Rows of activations as a product wants them. Buffers hold whole tiles of kTileRows rows.
// In 16 bits: as two bytes (`high` · 256 + `low`) or whole (`whole`), whichever the kernels multiply, with a `scale` per row
// for int8, per group of inputs for q4 and q8. `sum` of each group's numbers: times the scale for q4, times -128 for q8.
struct Activations {
  int16_t* whole = nullptr;
  uint8_t* low = nullptr;
  uint8_t* high = nullptr;
  float* scale = nullptr;
  float* sum = nullptr;
  int32_t* zero = nullptr;
};

// Where a product leaves its sums [m, n]: they take the place of what is at `out`, or are added to it.
struct Target {
  float* out = nullptr;
  int64_t ldo = 0;
  bool add = false;
};

// One layer's cache and how a step's rows see it.
struct Cache {
  char* data = nullptr;  // [blocks, block_size, 2, kv_heads, head_dim]
  Kind kind = Kind::f32;
  int block_size = 0;
  int kv_heads = 0;
  int head_dim = 0;

  int64_t row() const { return 2LL * kv_heads * head_dim; }
};

struct Attention {
  Cache cache;
  const float* queries = nullptr;  // [T, ...] rows of `stride`, heads side by side
  int64_t stride = 0;
  float* out = nullptr;  // [T, heads · head_dim]
  int heads = 0;
  float scale = 1;
  float soft_cap = 0;  // 0: none
  int window = 0;      // 0: none
};

// Rows [first, first + rows) of `queries`, at positions `start` and on, of the sequence whose blocks are `blocks`; `together`:
// one thread attends with all KV heads, one after another.
struct Span {
  const int32_t* blocks = nullptr;
  int first = 0;
  int start = 0;
  int rows = 0;
  bool together = false;
};

// Products of rows as tiles of bfloat16 numbers [row / 16][k / 32][parts][16][32], whose inputs are whole groups: with one part
// rows and weights (bfloat16, q4, q8) are rounded to bfloat16; float16 and float32 weights, and rows, are split into two and
// three parts, which is for numbers that are tame: see `rows`.
struct Tiles {
  // false if a number of the row is so large (2^64) or not a number that parts can't stand for it
  bool (*rows)(const float* x, int k, int row, uint16_t* tiles);
  void (*gemm)(const Matrix&, const uint16_t* rows, int row, int m, int first, int last, const Target&, float* scratch);
  // the same for panels of 16 outputs of both halves of w: tiles of silu or gelu of the first half times the second, and
  // whether these are tame
  bool (*silu)(const Matrix&, const uint16_t* rows, int row, int m, int first, int last, uint16_t* gated, float* scratch);
  bool (*gelu)(const Matrix&, const uint16_t* rows, int row, int m, int first, int last, uint16_t* gated, float* scratch);
};

struct Kernels {
  const char* name;
  // out[m, n] = x[m, k] · wᵀ + bias for float panels [first, last); `scratch` of gemm_scratch(k) floats where w isn't float32
  void (*gemm)(const Matrix&, const float* x, int64_t ldx, int m, int first, int last, float* out, int64_t ldo, float* scratch);
  // the same for panels of int8 and of q4 and q8, and rows [row, row + m) of quantised activations
  void (*gemm_int)(const Matrix&, const Activations&, int row, int m, int first, int last, float* out, int64_t ldo);
  void (*gemm_grouped)(const Matrix&, const Activations&, int row, int m, int first, int last, float* out, int64_t ldo);
  void (*quantise)(const Matrix&, const float* x, int row, const Activations&);
  void (*quantise_groups)(const Matrix&, const float* x, int row, const Activations&);
  // by the parts of a number less one; null where there are no tiles
  const Tiles* tiles[3];
  int grouped_rows;  // up to so many rows gemm_grouped is the quickest for q4 and q8
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  void (*add)(float* to, const float* x, int n);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*gelu_mul)(const float* gate, const float* up, int n, float* out);
  void (*rotate)(float* head, const float* turn, int size);  // `turn`: cosines [size / 2], sines [size / 2]
  void (*store)(const float* x, Kind, void* to, int n);
  // one sequence's rows for one KV head; `scratch` of attention_scratch() floats
  void (*attend)(const Attention&, const Span&, int kv_head, float* scratch);
  int64_t (*attention_scratch)(int heads, int kv_heads, int head_dim);
  int (*largest)(const float* x, int n);  // index of the first of the largest
};

// Floats of scratch that a thread needs for products with k inputs: a panel in float32, or two pieces of it in bfloat16.
constexpr int64_t gemm_scratch(int k) { return static_cast<int64_t>(kFloatPanel) * k + kFloatPanel * kGroup; }

// Inputs at a time of products in parts: 32 outputs' weights for them in three parts (36 KiB) stay in the first-level cache
// (48 KiB) over all rows, and sums so short are more exact than one of all inputs.
constexpr int kSplitInputs = 192;
// The same for products in parts: two pieces of weights, and the sums of so many rows.
constexpr int64_t split_scratch(int parts, int rows) { return static_cast<int64_t>(kFloatPanel) * (parts * kSplitInputs + rows); }

// One output's weights, widened: a row of a table of embeddings.
void unpack_row(const Matrix&, int output, float* to);

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
#endif

// The kernels named (`auto`: the best that this CPU has), or null where the CPU can't run them.
const Kernels* find_kernels(const char* name);

}  // namespace paceline
