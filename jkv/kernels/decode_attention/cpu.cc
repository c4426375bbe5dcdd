// Decode attention on a CPU. A task takes one head's share of the slots, decodes those that a query sees, TILE at a
// time, to floats in the first-level cache, and adds them to an online softmax of each query row. Dead slots are never
// read. All sums are float32, in an order that depends on shapes alone, so that two runs give the same bits.
//
// Letters: B rows, H kv heads, Hs heads of `pos` (H or 1), R = G * T query rows per kv head, C slots, D channels of the
// codes, W channels of queries and sums: D rounded up to whole registers, the rest being 0.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifndef WIDTH  // floats of a vector register
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
#elif defined(__ARM_NEON)
#define WIDTH 4
#else
#error "this CPU has none of AVX-512, AVX2 and NEON"
#endif
#endif

namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

constexpr int64_t TILE = 16;         // slots decoded together: keys and values of 128 channels take 16 KiB
constexpr int64_t MAX_DIM = 512;     // channels
constexpr int TOKENS = 8;            // dot products of a query that run together, one register each
constexpr int64_t TASKS = 64;        // tasks of a call, if there are as many shares of MIN_SHARE slots
constexpr int64_t MIN_SHARE = 128;   // slots of a task
constexpr int64_t ALONE = 1 << 18;   // calls of fewer products run on one thread
constexpr float NONE = -std::numeric_limits<float>::infinity();

inline Floats load(const float* x) {
  Floats y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline float sum(Floats x) {
  typedef float Four __attribute__((vector_size(16)));
  Four y = {x[0], x[1], x[2], x[3]};  // compilers take such a part out of a register without a detour through memory
#if WIDTH > 4
  y += Four{x[4], x[5], x[6], x[7]};
#endif
#if WIDTH > 8
  y += Four{x[8], x[9], x[10], x[11]} + Four{x[12], x[13], x[14], x[15]};
#endif
  return (y[0] + y[2]) + (y[1] + y[3]);
}

inline float from_bits(uint32_t x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// exp(x) for x <= 0 within 2 units in the last place: 2**n times a Taylor series on half a factor of 2. 0 below the
// range of normal floats; NaN stays NaN.
inline Floats exponential(Floats x) {
  const float low = -87.0f, log2e = 1.442695041f, high_part = 0.693359375f, low_part = -2.12194440e-4f;
  const float rounder = 12582912.0f;  // 1.5 * 2**23: adding it rounds to whole numbers
  Floats clear = x < low ? Floats{} + low : x;
  Floats shifted = clear * log2e + rounder;
  Floats n = shifted - rounder;
  Floats r = clear - n * high_part - n * low_part;  // ln 2 in two parts, the first with trailing zeros
  Floats y = r * (1 / 5040.0f) + (1 / 720.0f);
  y = y * r + (1 / 120.0f);
  y = y * r + (1 / 24.0f);
  y = y * r + (1 / 6.0f);
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;  // the low bits of `shifted` are n
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < low ? Floats{} : y * power;
}

// Numbers of 16 and 8 bits. Nothing goes through a subnormal float32, because XLA's threads flush these to zero.

inline float from_bfloat16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

template <int exponent, int mantissa>
inline float from_small(uint32_t x) {
  constexpr uint32_t bias = (1 << (exponent - 1)) - 1, sign = 1 << (exponent + mantissa);
  const uint32_t size = x & (sign - 1);
  const float few = static_cast<float>(static_cast<int32_t>(size)) * from_bits((128 - bias - mantissa) << 23);
  const float y = size >> mantissa ? from_bits((size << (23 - mantissa)) + ((127 - bias) << 23)) : few;
  return x & sign ? -y : y;
}

inline float from_float16(uint16_t x) {
  const uint32_t special = (x & 0x8000u) << 16 | 0x7f800000u | (x & 0x3ffu) << 13;  // infinity and NaN
  return (x & 0x7c00) == 0x7c00 ? from_bits(special) : from_small<5, 10>(x);
}

inline float from_float8(uint8_t x) {  // e4m3fn: no infinity, and one NaN
  return (x & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : from_small<4, 3>(x);
}

inline float from_exponent(uint8_t e) {  // as bitpacking.powers
  return e ? from_bits(static_cast<uint32_t>(std::min<int>(e, 190)) << 23) : from_bits(1u << 23) * 0.5f;
}

// Converts n numbers to floats.
void convert(const void* from, DataType type, int64_t n, float* __restrict to) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  const auto* halves = static_cast<const uint16_t*>(from);
  switch (type) {
    case DataType::F32: std::memcpy(to, from, n * sizeof(float)); break;
    case DataType::BF16: for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat16(halves[i]); break;
    case DataType::F16: for (int64_t i = 0; i < n; ++i) to[i] = from_float16(halves[i]); break;
    case DataType::F8E4M3FN: for (int64_t i = 0; i < n; ++i) to[i] = from_float8(bytes[i]); break;
    default: for (int64_t i = 0; i < n; ++i) to[i] = from_exponent(bytes[i]); break;
  }
}

// Adds `bits` of each code, at bit `shift`, to `to`: byte r of n holds channels r, r + n, ..., low bits first.
template <int bits, int shift>
void unpack_plane(const uint8_t* __restrict from, int64_t dim, uint8_t* __restrict to) {
  const int64_t n = dim * bits / 8;
#pragma GCC unroll 8
  for (int field = 0; field < 8 / bits; ++field) {
    uint8_t* __restrict own = to + field * n;
    for (int64_t r = 0; r < n; ++r) {
      const uint8_t x = static_cast<uint8_t>(from[r] >> (bits * field)) & ((1 << bits) - 1);
      own[r] = shift ? own[r] | static_cast<uint8_t>(x << shift) : x;
    }
  }
}

void unpack(const uint8_t* from, int bits, int64_t dim, uint8_t* to) {
  switch (bits) {
    case 1: unpack_plane<1, 0>(from, dim, to); break;
    case 2: unpack_plane<2, 0>(from, dim, to); break;
    case 3: unpack_plane<2, 0>(from, dim, to); unpack_plane<1, 2>(from + dim / 4, dim, to); break;
    case 4: unpack_plane<4, 0>(from, dim, to); break;
    case 5: unpack_plane<4, 0>(from, dim, to); unpack_plane<1, 4>(from + dim / 2, dim, to); break;
    default: unpack_plane<4, 0>(from, dim, to); unpack_plane<2, 4>(from + dim / 2, dim, to); break;
  }
}

void scale(const uint8_t* __restrict from, int64_t n, float step, float low, float* __restrict to) {
  for (int64_t d = 0; d < n; ++d) to[d] = static_cast<float>(static_cast<int32_t>(from[d])) * step + low;
}

void scale_each(const uint8_t* __restrict from, int64_t n, const float* __restrict step, const float* __restrict low,
                float* __restrict to) {
  for (int64_t d = 0; d < n; ++d) to[d] = static_cast<float>(static_cast<int32_t>(from[d])) * step[d] + low[d];
}

// Keys or values, as KernelCodes describes them; absent arrays have no elements.
struct Side {
  ffi::AnyBuffer codes, step, low, kept, table;
  int bits;
};

// Decodes the slots of one head. Steps and lows that slots share are converted once.
class Reader {
 public:
  Reader(const Side& side, int64_t head, int64_t dim)
      : type_(side.codes.element_type()), bits_(side.bits), dim_(dim), width_(side.codes.dimensions()[3]) {
    const int64_t slots = side.codes.dimensions()[2];
    codes_ = rows(side.codes, head * slots, width_, slot_bytes_);
    if (side.kept.element_count()) kept_ = rows(side.kept, head * slots, dim / 8, kept_bytes_);
    if (bits_ == 0) return;
    const int64_t steps = side.step.dimensions()[2];
    groups_ = side.step.dimensions()[3];
    grain_ = slots / steps;
    step_type_ = side.step.element_type();
    steps_ = rows(side.step, head * steps, groups_, step_bytes_);
    if (side.low.element_count()) {
      low_type_ = side.low.element_type();
      lows_ = rows(side.low, head * steps, groups_, low_bytes_);
    }
    middle_ = step_type_ == DataType::U8 ? -static_cast<float>(1 << (bits_ - 1)) : 0.0f;  // with exponents it is 0
    if ((has_table_ = side.table.element_count() > 0)) {
      int64_t bytes = 0;
      const int64_t n = int64_t{1} << bits_;
      convert(rows(side.table, head, n, bytes), side.table.element_type(), n, table_);
    }
  }

  void read(int64_t slot, float* __restrict to) {
    const uint8_t* from = codes_ + slot * slot_bytes_;
    if (bits_ == 0) return kept_ ? spread(from, slot, to) : convert(from, type_, dim_, to);
    if (grain_ == 1)
      hold(slot);
    else if (slot / grain_ != held_)
      hold(held_ = slot / grain_);
    if (bits_ != 8) {
      unpack(from, bits_, dim_, unpacked_);
      from = unpacked_;
    }
    const int64_t each = dim_ / groups_;
    if (has_table_) {
      for (int64_t d = 0; d < dim_; ++d) to[d] = table_[from[d]] * step_[d / each];
    } else if (each == 1) {
      scale_each(from, dim_, step_, low_, to);
    } else {
      for (int64_t g = 0; g < groups_; ++g) scale(from + g * each, each, step_[g], low_[g], to + g * each);
    }
  }

 private:
  // Row `first` of an array whose rows have n numbers, and the bytes of a row.
  static const uint8_t* rows(const ffi::AnyBuffer& x, int64_t first, int64_t n, int64_t& bytes) {
    bytes = n * static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
    return static_cast<const uint8_t*>(x.untyped_data()) + first * bytes;
  }

  void hold(int64_t index) {
    convert(steps_ + index * step_bytes_, step_type_, groups_, step_);
    if (lows_)
      convert(lows_ + index * low_bytes_, low_type_, groups_, low_);
    else
      for (int64_t g = 0; g < groups_; ++g) low_[g] = middle_ * step_[g];
  }

  // The numbers of the channels whose bits are set, and 0 elsewhere.
  void spread(const uint8_t* from, int64_t slot, float* __restrict to) {
    convert(from, type_, width_, step_);
    const uint8_t* bits = kept_ + slot * kept_bytes_;
    int64_t next = 0;
    for (int64_t d = 0; d < dim_; ++d) to[d] = bits[d / 8] >> (d % 8) & 1 && next < width_ ? step_[next++] : 0.0f;
  }

  DataType type_, step_type_ = DataType::F32, low_type_ = DataType::F32;
  int bits_;
  bool has_table_ = false;
  const uint8_t *codes_ = nullptr, *kept_ = nullptr, *steps_ = nullptr, *lows_ = nullptr;
  int64_t dim_, width_, groups_ = 1, grain_ = 1, held_ = -1;
  int64_t slot_bytes_ = 0, kept_bytes_ = 0, step_bytes_ = 0, low_bytes_ = 0;
  float middle_ = 0;
  uint8_t unpacked_[MAX_DIM];
  float step_[MAX_DIM], low_[MAX_DIM], table_[256];
};

struct Problem {
  int64_t rows, heads, pos_heads, tokens, queries, width, slots, shares, dim;
  const float* q;
  const int32_t *pos, *first, *last, *ends;
  Side k, v;
  float scale, cap;
  float* scratch;  // of each task: acc [R,W], m [R], l [R]

  int64_t tasks() const { return rows * heads * shares; }
  int64_t task_floats() const { return queries * (width + 2); }
};

// Adds n weighted values to `count` registers of a row's output.
template <int count>
void mix(const float* weights, const float* values, int64_t n, int64_t width, float* acc) {
  Floats sums[count];
  for (int i = 0; i < count; ++i) sums[i] = load(acc + i * WIDTH);
  for (int64_t t = 0; t < n; ++t)
    for (int i = 0; i < count; ++i) sums[i] += weights[t] * load(values + t * width + i * WIDTH);
  for (int i = 0; i < count; ++i) store(acc + i * WIDTH, sums[i]);
}

// Adds n decoded slots to the online softmax of a query row, which sees the positions from `first` to `last`. A NaN
// among its logits makes everything NaN.
void add_tile(const Problem& p, const float* q, const float* keys, const float* values, const int32_t* pos, int64_t n,
              int32_t first, int32_t last, float* acc, float& m, float& l) {
  alignas(64) float weights[TILE];
  for (int64_t t = 0; t < TILE; t += TOKENS) {
    Floats sums[TOKENS] = {};
    for (int64_t d = 0; d < p.width; d += WIDTH) {
      const Floats x = load(q + d);
      for (int i = 0; i < TOKENS; ++i) sums[i] += x * load(keys + (t + i) * p.width + d);
    }
    for (int i = 0; i < TOKENS; ++i) weights[t + i] = sum(sums[i]) * p.scale;
  }
  if (p.cap > 0)
    for (int64_t t = 0; t < n; ++t) weights[t] = p.cap * std::tanh(weights[t] / p.cap);
  float top = m;
  for (int64_t t = 0; t < TILE; ++t) {
    const float w = weights[t] = pos[t] >= first && pos[t] <= last ? weights[t] : NONE;
    top = w > top || w != w ? w : top;
  }
  if (top == NONE) return;
  if (top != m) {
    const float fade = m == NONE ? 0.0f : std::exp(m - top);
    for (int64_t d = 0; d < p.width; d += WIDTH) store(acc + d, load(acc + d) * fade);
    l *= fade;
    m = top;
  }
  Floats total = {};
  for (int64_t t = 0; t < TILE; t += WIDTH) {
    const Floats w = exponential(load(weights + t) - m);
    store(weights + t, w);
    total += w;
  }
  l += sum(total);
  for (int64_t d = 0; d < p.width;) {
    const int64_t left = (p.width - d) / WIDTH;
    const int64_t count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    (count == 8 ? mix<8> : count == 4 ? mix<4> : count == 2 ? mix<2> : mix<1>)(weights, values + d, n, p.width, acc + d);
    d += count * WIDTH;
  }
}

// Attends with all query rows of a head to one share of its slots.
void attend_share(const Problem& p, int64_t task) {
  const int64_t share = task % p.shares, head = task / p.shares, row = head / p.heads;
  const int64_t place = p.pos_heads == 1 ? row : head;
  const int32_t *pos = p.pos + place * p.slots, *first = p.first + row * p.tokens, *last = p.last + row * p.tokens;
  const float* q = p.q + head * p.queries * p.width;
  float *acc = p.scratch + task * p.task_floats(), *m = acc + p.queries * p.width, *l = m + p.queries;
  std::fill(acc, m, 0.0f);
  std::fill(m, l, NONE);
  std::fill(l, l + p.queries, 0.0f);
  // The positions that any query sees; dead slots are at -1, and a query may start before 0.
  const int32_t low = std::max(0, *std::min_element(first, first + p.tokens));
  const int32_t high = *std::max_element(last, last + p.tokens);
  const int64_t end = std::min<int64_t>(p.ends[place], p.slots);
  const int64_t begin = p.slots * share / p.shares, stop = std::min(p.slots * (share + 1) / p.shares, end);

  alignas(64) float keys[TILE * MAX_DIM], values[TILE * MAX_DIM];
  std::fill(keys, keys + TILE * p.width, 0.0f);
  std::fill(values, values + TILE * p.width, 0.0f);
  Reader key_reader(p.k, head, p.dim), value_reader(p.v, head, p.dim);
  for (int64_t slot = begin; slot < stop;) {
    int32_t found[TILE];
    std::fill(found, found + TILE, -1);
    int64_t n = 0;
    for (; slot < stop && n < TILE; ++slot) {
      if (pos[slot] < low || pos[slot] > high) continue;
      key_reader.read(slot, keys + n * p.width);
      value_reader.read(slot, values + n * p.width);
      found[n++] = pos[slot];
    }
    if (n == 0) return;
    for (int64_t r = 0; r < p.queries; ++r) {
      const int64_t t = r % p.tokens;
      add_tile(p, q + r * p.width, keys, values, found, n, std::max(first[t], 0), last[t], acc + r * p.width, m[r], l[r]);
    }
  }
}

// Joins the shares of one query row in their order.
void join(const Problem& p, int64_t head, int64_t r, float* acc, float& m, float& l) {
  m = NONE;
  l = 0;
  std::fill(acc, acc + p.width, 0.0f);
  const int64_t sums = p.queries * p.width;
  const float* parts = p.scratch + head * p.shares * p.task_floats();
  for (int64_t i = 0; i < p.shares; ++i) {
    const float x = parts[i * p.task_floats() + sums + r];
    m = x > m || x != x ? x : m;
  }
  if (m == NONE) return;
  for (int64_t i = 0; i < p.shares; ++i) {
    const float *part = parts + i * p.task_floats(), *own = part + r * p.width;
    const float weight = std::exp(part[sums + r] - m);
    l += part[sums + p.queries + r] * weight;
    for (int64_t d = 0; d < p.width; d += WIDTH) store(acc + d, load(acc + d) + load(own + d) * weight);
  }
}

// Runs run(i) for i below n, on this thread and on those of XLA's pool that are free. A handler must not wait for tasks
// that have not begun, because handlers occupy the pool's threads themselves: helpers take indices from a counter, and
// one that begins late finds none left.
template <class Run>
void in_parallel(ffi::ThreadPool& pool, int64_t n, int64_t threads, Run run) {
  struct State {
    Run run;
    int64_t n;
    std::atomic<int64_t> next{0}, done{0};
    State(Run run, int64_t n) : run(run), n(n) {}
    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        run(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto state = std::make_shared<State>(run, n);
  for (int64_t i = 1; i < std::min(threads, n); ++i) pool.Schedule([state] { state->work(); });
  state->work();
  while (state->done.load(std::memory_order_acquire) < n) std::this_thread::yield();
}

std::string mismatch(const Problem& p, ffi::AnyBuffer::Dimensions pos) {
  if (pos[0] != p.rows || (pos[1] != p.heads && pos[1] != 1)) return "positions";
  for (const Side* side : {&p.k, &p.v}) {
    const auto codes = side->codes.dimensions();
    if (codes.size() != 4 || codes[0] != p.rows || codes[1] != p.heads || codes[2] != p.slots) return "codes";
    if (side->bits && side->step.dimensions().size() != 4) return "steps";
  }
  return p.width > MAX_DIM || p.width % 16 || p.dim > p.width ? "channels" : "";
}

// Arguments: q f32[B,H,G,T,W], pos i32[B,Hs,C], first and last i32[B,T], ends i32[B,Hs,1], then codes, steps, lows, kept
// and table of the keys and of the values. Results: acc f32[B,H,G,T,W], m and l f32[B,H,G,T].
ffi::Error Attend(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results, int32_t key_bits,
                  int32_t value_bits, int32_t dim, float scale, float cap) {
  if (args.size() != 15 || results.size() != 3) return ffi::Error::InvalidArgument("unexpected number of arrays");
  const auto array = [&](size_t i) { return *args.get<ffi::AnyBuffer>(i); };
  const auto numbers = [&](size_t i) { return array(i).typed_data<int32_t>(); };
  const auto result = [&](size_t i) { return (*results.get<ffi::AnyBuffer>(i))->typed_data<float>(); };
  const auto side = [&](size_t i, int bits) {
    return Side{array(i), array(i + 1), array(i + 2), array(i + 3), array(i + 4), bits};
  };
  const auto shape = array(0).dimensions(), places = array(1).dimensions();
  Problem p{shape[0], shape[1], places[1], shape[3], shape[2] * shape[3], shape[4], places[2], 1, dim,
            array(0).typed_data<float>(), numbers(1), numbers(2), numbers(3), numbers(4), side(5, key_bits),
            side(10, value_bits), scale, cap, nullptr};
  if (const std::string what = mismatch(p, places); !what.empty()) return ffi::Error::InvalidArgument("unexpected " + what);
  const int64_t heads = p.rows * p.heads;
  if (heads == 0 || p.queries == 0) return ffi::Error::Success();
  p.shares = std::max<int64_t>(1, std::min((p.slots + MIN_SHARE - 1) / MIN_SHARE, TASKS / heads));
  std::vector<float> scratch;
  try {
    scratch.resize(p.tasks() * p.task_floats());
  } catch (const std::exception&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for partial sums");
  }
  p.scratch = scratch.data();
  int64_t live = 0;
  for (int64_t i = 0; i < p.rows * p.pos_heads; ++i) live += p.ends[i];
  const int64_t products = live * (p.heads / p.pos_heads) * (p.queries + 2) * p.width * 2;
  in_parallel(pool, p.tasks(), products < ALONE ? 1 : pool.num_threads(), [p](int64_t i) { attend_share(p, i); });
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t r = 0; r < p.queries; ++r) {
      const int64_t at = head * p.queries + r;
      join(p, head, r, result(0) + at * p.width, result(1)[at], result(2)[at]);
    }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Handler, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("key_bits")
                                  .Attr<int32_t>("value_bits")
                                  .Attr<int32_t>("dim")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));
