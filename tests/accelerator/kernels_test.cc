// SPDX-License-Identifier: Apache-2.0
// Compares the kernels of this processor with sums in double precision.
//
// Compile it with sanitizers. They do not check masked loads of AVX, so about
// half of the cases place the end of each buffer directly before an
// inaccessible page.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace {

using spdf::Bfloat16;

constexpr float kUnwritten = 12345;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kTokens[] = {0, 1, 15, 16, 17, 33, 127, 128, 129, 300};
constexpr int64_t kShapes[][2] = {
    {1, 1},    {1, 17},    {513, 1},   {15, 16},   {16, 255}, {17, 300},
    {64, 63},  {65, 128},  {255, 257}, {256, 256}, {257, 15}, {300, 64},
    {513, 97}, {193, 513}, {97, 385},  {2, 513},
};
constexpr int kRounds = 5;

enum class Pattern { kFull, kHalf, kTenth, kFew, kEmpty, kSkewed, kBlocks };
constexpr int kPatterns = 6;  // Those of matrices of any size.

enum class Gradient { kSame, kSameButOtherBytes, kOther, kFull, kEmpty };
constexpr int kGradients = 5;

std::mt19937 generator;

// Draws from [0, 1). Unlike std::uniform_real_distribution, the result does not
// depend on the compiler.
double Uniform() { return generator() / 4294967296.0; }

// Draws a value from a distribution whose sums do not cancel, so that a
// relative tolerance holds.
float Value() { return static_cast<float>(1.5 * Uniform() - 0.5) + 1e-6f; }

float Wide(float value) { return value; }
float Wide(Bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Assigns a value; to a bfloat16, rounded toward zero.
void Assign(float value, float* to) { *to = value; }
void Assign(float value, Bfloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = static_cast<uint16_t>(bits >> 16);
}

// Returns the largest relative error of rounding to the element type.
double Rounding(float) { return 0; }
double Rounding(Bfloat16) { return 1. / 256; }

// Returns a random nonzero byte with one bit, because any nonzero byte of a
// mask means kept.
uint8_t Kept() { return uint8_t{1} << generator() % 8; }

// An array of exactly `count` entries, aligned to the size of one entry only.
template <typename T>
class Buffer {
 public:
  Buffer(int64_t count, bool guarded)
      : count_(count), guarded_(guarded), bytes_(count * sizeof(T)) {
    if (!guarded_) {
      memory_ = static_cast<char*>(std::malloc(kShift + bytes_));
      if (memory_ == nullptr) std::abort();
      data_ = reinterpret_cast<T*>(memory_ + kShift);
      return;
    }
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t used = (bytes_ + page - 1) / page * page;
    mapped_ = used + page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<char*>(memory);
    if (mprotect(memory_ + used, page, PROT_NONE)) std::abort();
    data_ = reinterpret_cast<T*>(memory_ + used - bytes_);
  }
  ~Buffer() {
    if (guarded_) {
      munmap(memory_, mapped_);
    } else {
      std::free(memory_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) const { return data_[i]; }

  void Fill(float value) {
    for (int64_t i = 0; i < count_; ++i) Assign(value, data_ + i);
  }
  bool SameBits(const Buffer& other) const {
    return !std::memcmp(data_, other.data_, bytes_);
  }

 private:
  static constexpr size_t kShift = sizeof(T);
  int64_t count_;
  bool guarded_;
  size_t bytes_;
  size_t mapped_ = 0;
  char* memory_;
  T* data_;
};

using Bytes = Buffer<uint8_t>;

struct Case {
  int64_t tokens, inputs, outputs;
  Pattern pattern;
  Gradient gradient;
  bool non_finite;
  bool guarded;
};

// Returns whether an entry is kept. Some rows and columns are empty, unless the
// matrix is small or the mask is full.
bool Keeps(const Case& c, Pattern pattern, int64_t i, int64_t j) {
  const bool hole = (c.inputs > 4 && i % 7 == 3) ||
                    (c.outputs > 4 && j % 5 == 2);
  const double u = Uniform();
  switch (pattern) {
    case Pattern::kFull:
      return true;
    case Pattern::kHalf:
      return !hole && u < 0.5;
    case Pattern::kTenth:
      return !hole && u < 0.1;
    case Pattern::kFew:
      return !hole && u < 0.04;
    case Pattern::kEmpty:
      return false;
    case Pattern::kBlocks:
      return (i / 32 * 5 + j / 32 * 7 + c.tokens) % 3 == 0;
    case Pattern::kSkewed:
      return j == c.outputs / 2 || (!hole && u < 0.03);
  }
  return false;
}

void FillMask(const Case& c, Pattern pattern, const Bytes& mask) {
  for (int64_t i = 0; i < c.inputs; ++i) {
    for (int64_t j = 0; j < c.outputs; ++j) {
      mask[i * c.outputs + j] = Keeps(c, pattern, i, j) ? Kept() : 0;
    }
  }
}

void FillGradientMask(const Case& c, const Bytes& mask, const Bytes& grad) {
  switch (c.gradient) {
    case Gradient::kSame:
      std::copy(mask.data(), mask.data() + mask.size(), grad.data());
      break;
    case Gradient::kSameButOtherBytes:
      for (int64_t i = 0; i < mask.size(); ++i) grad[i] = mask[i] ? Kept() : 0;
      break;
    case Gradient::kOther:
      FillMask(c, generator() % 2 ? Pattern::kHalf : Pattern::kTenth, grad);
      break;
    case Gradient::kFull:
      FillMask(c, Pattern::kFull, grad);
      break;
    case Gradient::kEmpty:
      FillMask(c, Pattern::kEmpty, grad);
      break;
  }
}

// Fills pruned weights with NaN, because they must not affect results.
template <typename Element>
void FillWeights(const Case& c, const Bytes& mask,
                 const Buffer<Element>& weights) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < mask.size(); ++i) {
    Assign(mask[i] ? Value() : kNan, &weights[i]);
    if (mask[i]) kept.push_back(i);
  }
  if (!c.non_finite || kept.empty()) return;
  Assign(kNan, &weights[kept[generator() % kept.size()]]);
  Assign(-kInfinity, &weights[kept[generator() % kept.size()]]);
}

template <typename Element>
void FillValues(bool non_finite, const Buffer<Element>& values) {
  for (int64_t i = 0; i < values.size(); ++i) Assign(Value(), &values[i]);
  if (!non_finite || !values.size()) return;
  Assign(kNan, &values[generator() % values.size()]);
  Assign(kInfinity, &values[generator() % values.size()]);
}

using Doubles = std::vector<double>;

// Returns y[tokens, outputs], or y[tokens, inputs] with `transpose`.
template <typename Element, typename Weight>
Doubles Product(const Case& c, const Buffer<Element>& x,
                const Buffer<Weight>& weights, const Bytes& mask,
                bool transpose) {
  const int64_t from = transpose ? c.outputs : c.inputs;
  const int64_t to = transpose ? c.inputs : c.outputs;
  Doubles y(c.tokens * to);
  for (int64_t i = 0; i < c.inputs; ++i) {
    for (int64_t j = 0; j < c.outputs; ++j) {
      if (!mask[i * c.outputs + j]) continue;
      const double weight = Wide(weights[i * c.outputs + j]);
      const Element* term = x.data() + (transpose ? j : i);
      double* sum = y.data() + (transpose ? i : j);
      for (int64_t t = 0; t < c.tokens; ++t) {
        sum[t * to] += weight * Wide(term[t * from]);
      }
    }
  }
  return y;
}

// Returns dw[inputs, outputs].
template <typename Element>
Doubles WeightGradient(const Case& c, const Buffer<Element>& x,
                       const Buffer<Element>& dy, const Bytes& mask) {
  Doubles dw(c.inputs * c.outputs);
  for (int64_t i = 0; i < c.inputs; ++i) {
    for (int64_t j = 0; j < c.outputs; ++j) {
      const int64_t at = i * c.outputs + j;
      if (!mask[at]) continue;
      double sum = 0;
      for (int64_t t = 0; t < c.tokens; ++t) {
        sum += static_cast<double>(Wide(x[t * c.inputs + i])) *
               Wide(dy[t * c.outputs + j]);
      }
      dw[at] = sum;
    }
  }
  return dw;
}

[[noreturn]] void Fail(const Case& c, const char* kernels, const char* what,
                       const char* why) {
  std::fprintf(stderr,
               "%s, %s: %s; tokens %d, inputs %d, outputs %d, pattern %d, "
               "gradient %d, non-finite %d, guarded %d\n",
               kernels, what, why, static_cast<int>(c.tokens),
               static_cast<int>(c.inputs), static_cast<int>(c.outputs),
               static_cast<int>(c.pattern), static_cast<int>(c.gradient),
               c.non_finite, c.guarded);
  std::exit(1);
}

// Returns the tolerance relative to the largest entry. Errors of rounding
// accumulate like a random walk (Higham and Mary, A New Approach to
// Probabilistic Rounding Error Analysis, 2019): they grow with the square root
// of the number of terms.
double Tolerance(const Case& c) {
  const double terms = std::max({c.tokens, c.inputs, c.outputs});
  return 2e-6 * std::max(1., std::sqrt(terms / 256));
}

template <typename Element>
void Compare(const Case& c, const char* kernels, const char* what,
             const Doubles& want, const Buffer<Element>& got) {
  double scale = 0;
  for (double value : want) {
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  }
  for (int64_t i = 0; i < got.size(); ++i) {
    const double result = Wide(got[i]);
    const double tolerance =
        Tolerance(c) * scale + Rounding(Element()) * std::abs(want[i]);
    bool equal = std::abs(want[i] - result) <= tolerance;
    // An expected zero is an empty sum, which must be exactly zero.
    if (!std::isfinite(want[i]) || want[i] == 0) equal = want[i] == result;
    if (std::isnan(want[i])) equal = std::isnan(result);
    if (equal) continue;
    char why[100];
    std::snprintf(why, sizeof why, "entry %d is %.9g instead of %.9g",
                  static_cast<int>(i), result, want[i]);
    Fail(c, kernels, what, why);
  }
}

void OnThreads(int64_t n, const std::function<void(int64_t)>& f) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int64_t j; (j = next++) < n;) f(j);
    });
  }
  for (auto& thread : threads) thread.join();
}

void InReverse(int64_t n, const std::function<void(int64_t)>& f) {
  while (n--) f(n);
}

// Runs a function twice for each number of workers, compares the results in
// `got` with `want`, and requires both runs to give the same bits.
template <typename Element, typename Function>
void Check(const Case& c, const char* kernels, const char* what,
           const std::vector<const Doubles*>& want,
           const std::vector<Buffer<Element>*>& got,
           const std::vector<Buffer<Element>*>& again,
           const Function& run) {
  for (int64_t number : {1, 3}) {
    for (const auto* outputs : {&got, &again}) {
      for (Buffer<Element>* output : *outputs) output->Fill(kUnwritten);
      const bool threads = outputs == &got;
      run(spdf::Workers{number, threads ? OnThreads : InReverse}, *outputs);
    }
    for (size_t i = 0; i < want.size(); ++i) {
      Compare(c, kernels, what, *want[i], *got[i]);
      if (!got[i]->SameBits(*again[i])) {
        Fail(c, kernels, what, "differs when repeated");
      }
    }
  }
}

// Sets the bits of kept entries and returns their number.
int64_t FillBits(const Case& c, const Bytes& mask, const Bytes& bits) {
  const int64_t row = (c.outputs + 7) / 8;
  std::fill(bits.data(), bits.data() + bits.size(), uint8_t{0});
  int64_t kept = 0;
  for (int64_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    const int64_t column = i % c.outputs;
    bits[i / c.outputs * row + column / 8] |= uint8_t{1} << column % 8;
    ++kept;
  }
  return kept;
}

// Packs the kept weights, and fills the padding with NaN, because it must not
// affect results.
template <typename Element>
void PackInto(const Bytes& mask, const Buffer<Element>& weights,
              const Buffer<Element>& values) {
  int64_t at = 0;
  for (int64_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) values[at++] = weights[i];
  }
  for (; at < values.size(); ++at) Assign(kNan, &values[at]);
}

Doubles PackedGradient(const Doubles& dw, const Bytes& mask, int64_t size) {
  Doubles packed;
  for (int64_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) packed.push_back(dw[i]);
  }
  packed.resize(size);
  return packed;
}

template <typename Element>
void CheckRefusal(const Case& c, const spdf::Kernels<Element>& kernels,
                  spdf::Packed<Element> packed, int64_t size,
                  const Buffer<Element>& x, Buffer<Element>* y) {
  packed.size = size;
  try {
    kernels.multiply_packed({1, InReverse}, x.data(), packed, false, c.tokens,
                            y->data());
  } catch (const std::length_error&) {
    return;
  }
  Fail(c, kernels.name, "multiply packed", "has more values than room");
}

// Lists the kept weights by output. The padding has NaN, because it must not
// affect results.
template <typename Value>
struct Listed {
  Buffer<Value> values;
  Buffer<uint16_t> indices;
  Buffer<int32_t> starts;

  Listed(const Case& c, const Bytes& mask, const Buffer<Value>& weights,
         int64_t size)
      : values(size, c.guarded),
        indices(size, c.guarded),
        starts(c.outputs + 1, c.guarded) {
    int32_t at = 0;
    for (int64_t o = 0; o < c.outputs; ++o) {
      starts[o] = at;
      for (int64_t i = 0; i < c.inputs; ++i) {
        if (!mask[i * c.outputs + o]) continue;
        values[at] = weights[i * c.outputs + o];
        indices[at++] = static_cast<uint16_t>(i);
      }
    }
    starts[c.outputs] = at;
    for (int64_t p = at; p < size; ++p) {
      Assign(kNan, &values[p]);
      indices[p] = 0;
    }
  }
  spdf::ListedMatrix<Value> Matrix(const Case& c) const {
    return {values.data(), indices.data(), starts.data(), values.size(),
            c.inputs, c.outputs};
  }
};

template <typename Value, typename Element>
void CheckListed(const Case& c, const spdf::Kernels<Element>& kernels,
                 void (*multiply)(const spdf::Workers&, const float*,
                                  const spdf::ListedMatrix<Value>&, int64_t,
                                  float*)) {
  const int64_t size = c.inputs * c.outputs;
  Bytes mask(size, c.guarded);
  FillMask(c, c.pattern, mask);
  Buffer<Value> weights(size, c.guarded);
  FillWeights(c, mask, weights);
  Buffer<float> x(c.tokens * c.inputs, c.guarded);
  FillValues(c.non_finite, x);
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) kept += mask[i] != 0;
  const Listed<Value> w(c, mask, weights, kept + 8 + generator() % 3);
  const Doubles want = Product(c, x, weights, mask, false);
  Buffer<float> y(c.tokens * c.outputs, c.guarded);
  Buffer<float> again(y.size(), c.guarded);
  using Outputs = std::vector<Buffer<float>*>;
  Check(c, kernels.name, "multiply listed", {&want}, Outputs{&y},
        Outputs{&again},
        [&](const spdf::Workers& workers, const Outputs& out) {
          multiply(workers, x.data(), w.Matrix(c), c.tokens, out[0]->data());
        });
}

template <typename Element>
void Test(const Case& c,
          const std::vector<const spdf::Kernels<Element>*>& all) {
  using Numbers = Buffer<Element>;
  const int64_t size = c.inputs * c.outputs;
  Bytes mask(size, c.guarded), grad(size, c.guarded);
  FillMask(c, c.pattern, mask);
  FillGradientMask(c, mask, grad);
  Numbers weights(size, c.guarded);
  FillWeights(c, mask, weights);
  Numbers x(c.tokens * c.inputs, c.guarded), dy(c.tokens * c.outputs, c.guarded);
  FillValues(c.non_finite, x);
  // dy is finite, because dx multiplies it by zero where only grad has an
  // entry.
  FillValues(false, dy);

  const spdf::Matrix<Element> w = {weights.data(), mask.data(), c.inputs, c.outputs};
  const spdf::Matrix<Element> unread = {nullptr, nullptr, c.inputs, c.outputs};
  Bytes bits(c.inputs * ((c.outputs + 7) / 8), c.guarded);
  const int64_t kept = FillBits(c, mask, bits);
  const int64_t size_packed = kept + generator() % 3;
  Numbers values(size_packed, c.guarded);
  PackInto(mask, weights, values);
  const spdf::Packed<Element> packed = {values.data(), bits.data(), size_packed,
                               c.inputs, c.outputs};
  const spdf::Packed<Element> unread_packed = {nullptr, bits.data(), size_packed,
                                      c.inputs, c.outputs};
  const Doubles y_want = Product(c, x, weights, mask, false);
  const Doubles dx_want = Product(c, dy, weights, mask, true);
  const Doubles dw_want = WeightGradient(c, x, dy, grad);
  const Doubles dvalues_want =
      PackedGradient(WeightGradient(c, x, dy, mask), mask, size_packed);
  Numbers dvalues(size_packed, c.guarded);
  Numbers dvalues_again(size_packed, c.guarded);
  Numbers y(dy.size(), c.guarded), y_again(dy.size(), c.guarded);
  Numbers dx(x.size(), c.guarded), dx_again(x.size(), c.guarded);
  Numbers dw(size, c.guarded), dw_again(size, c.guarded);

  using Outputs = std::vector<Numbers*>;
  using Run = std::function<void(const spdf::Workers&, const Outputs&)>;
  for (const spdf::Kernels<Element>* kernels : all) {
    const auto check = [&](const char* what,
                           const std::vector<const Doubles*>& want,
                           const Outputs& got, const Outputs& again,
                           const Run& run) {
      Check(c, kernels->name, what, want, got, again, run);
    };
    check("multiply", {&y_want}, {&y}, {&y_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->multiply(workers, x.data(), w, false, c.tokens,
                              out[0]->data());
          });
    check("multiply transposed", {&dx_want}, {&dx}, {&dx_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->multiply(workers, dy.data(), w, true, c.tokens,
                              out[0]->data());
          });
    check("differentiate", {&dx_want, &dw_want}, {&dx, &dw},
          {&dx_again, &dw_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->differentiate(workers, x.data(), dy.data(), w, grad.data(),
                                   c.tokens, out[0]->data(), out[1]->data());
          });
    check("differentiate without dx", {&dw_want}, {&dw},
          {&dw_again}, [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->differentiate(workers, x.data(), dy.data(), unread,
                                   grad.data(), c.tokens, nullptr,
                                   out[0]->data());
          });
    check("multiply packed", {&y_want}, {&y}, {&y_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->multiply_packed(workers, x.data(), packed, false, c.tokens,
                                     out[0]->data());
          });
    check("multiply packed transposed", {&dx_want}, {&dx},
          {&dx_again}, [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->multiply_packed(workers, dy.data(), packed, true, c.tokens,
                                     out[0]->data());
          });
    check("differentiate packed", {&dx_want, &dvalues_want},
          {&dx, &dvalues}, {&dx_again, &dvalues_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->differentiate_packed(workers, x.data(), dy.data(), packed,
                                          c.tokens, out[0]->data(),
                                          out[1]->data());
          });
    check("differentiate packed without dx", {&dvalues_want},
          {&dvalues}, {&dvalues_again},
          [&](const spdf::Workers& workers, const Outputs& out) {
            kernels->differentiate_packed(workers, x.data(), dy.data(),
                                          unread_packed, c.tokens, nullptr,
                                          out[0]->data());
          });
    if (kept) CheckRefusal(c, *kernels, packed, kept - 1, x, &y);
    if (c.tokens > 300) continue;
    CheckListed(c, *kernels, kernels->multiply_listed);
    CheckListed(c, *kernels, kernels->multiply_listed_bfloat16);
  }
}

}  // namespace

int main() {
  // Those of block masks leave others to those of their instruction set.
  std::vector<const spdf::Kernels<float>*> floats = {&spdf::kPortable};
  std::vector<const spdf::Kernels<float>*> float_blocks;
  std::vector<const spdf::Kernels<Bfloat16>*> bfloat16, bfloat16_blocks;
#if defined(__x86_64__)
  if (const auto* blocks = spdf::FindKernels<float>("avx2")) {
    if (blocks != &spdf::kAvx2blocks) std::abort();
    floats.push_back(&spdf::kAvx2);
    float_blocks.push_back(blocks);
  }
  if (const auto* blocks = spdf::FindKernels<float>("avx512")) {
    if (blocks != &spdf::kAvx512blocks) std::abort();
    floats.push_back(&spdf::kAvx512);
    float_blocks.push_back(blocks);
  }
  if (spdf::FindKernels<Bfloat16>()) {
    bfloat16 = {&spdf::kAvx512bf16};
    bfloat16_blocks = {&spdf::kAvx512bf16blocks};
    if (!std::strcmp(spdf::MatrixUnit(), "amx")) {
      bfloat16_blocks.push_back(&spdf::kAmx);
    }
  }
#endif
  std::vector<Case> cases;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& shape : kShapes) {
      Case c;
      const int number = static_cast<int>(cases.size());
      c.tokens = kTokens[(number + 3 * round) % std::size(kTokens)];
      c.inputs = shape[0];
      c.outputs = shape[1];
      c.pattern = static_cast<Pattern>((number + round) % kPatterns);
      c.gradient = static_cast<Gradient>((number + round / 2) % kGradients);
      c.non_finite = generator() % 4 == 0;
      c.guarded = generator() % 2;
      cases.push_back(c);
    }
  }
  // Cases with several regions, strips, blocks and tiles.
  for (Pattern pattern : {Pattern::kHalf, Pattern::kTenth, Pattern::kFew}) {
    cases.push_back({300, 513, 513, pattern, Gradient::kSame, false, true});
    cases.push_back({300, 300, 513, pattern, Gradient::kOther, true, false});
    cases.push_back({33, 270, 1100, pattern, Gradient::kOther, false, true});
  }
  // Results larger than the caches, in whole vectors and not.
  for (int64_t size : {1024, 1001}) {
    for (auto [inputs, outputs] : {std::pair(size, 3L), std::pair(3L, size)}) {
      cases.push_back({8500, inputs, outputs, Pattern::kHalf, Gradient::kSame,
                       false, true});
    }
  }
  // Masks of whole blocks, with every number of tokens in the last one, and
  // with more tokens than are summed at once.
  for (int64_t tokens = 1; tokens <= 34; ++tokens) {
    const auto gradient = static_cast<Gradient>(tokens % kGradients);
    cases.push_back({tokens, 64, 96, Pattern::kBlocks, gradient,
                     tokens % 4 == 0, tokens % 2 == 0});
  }
  for (Pattern pattern : {Pattern::kBlocks, Pattern::kFull, Pattern::kEmpty}) {
    cases.push_back({65, 160, 32, pattern, Gradient::kSame, true, true});
  }
  cases.push_back({1100, 32, 64, Pattern::kFull, Gradient::kSame, false, true});
  // Results of blocks that are larger than the caches.
  for (auto [inputs, outputs] : {std::pair(32, 1024), std::pair(1024, 32)}) {
    cases.push_back({1100, inputs, outputs, Pattern::kBlocks, Gradient::kSame,
                     false, true});
  }
  cases.push_back({9, 1024, 1024, Pattern::kBlocks, Gradient::kSame, false,
                   true});
  for (const Case& c : cases) {
    Test(c, floats);
    Test(c, bfloat16);
    if (c.inputs % 32 || c.outputs % 32) continue;
    Test(c, float_blocks);
    Test(c, bfloat16_blocks);
  }
  for (const auto* kernels : floats) std::printf("%s ", kernels->name);
  for (const auto* kernels : bfloat16) std::printf("%s ", kernels->name);
  std::printf("agree in %d cases\n",
              static_cast<int>(cases.size()));
}
