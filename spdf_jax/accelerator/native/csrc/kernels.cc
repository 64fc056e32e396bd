// The products, compiled once for every set of instructions: SPDF_KERNELS names
// the result and SPDF_SIMD the header of its vectors.
//
// A weight that is kept adds a multiple of one row of tokens to another. Tokens
// are therefore laid out feature by feature, in tiles of as many tokens as
// registers hold, and weights as lists, ordered such that what they read next
// is in cache.
#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include SPDF_SIMD

namespace spdf {
namespace {

using simd::kWidth;
using simd::Vector;

constexpr int64_t kRegionOutputs = 128;
constexpr int64_t kMostTerms = 384;  // Of a block.
constexpr int64_t kRowsAhead = 4;

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Returns aligned room; what was there before is lost.
  template <typename T>
  T* Get(int64_t count) {
    const size_t bytes = (count * sizeof(T) + kPage - 1) / kPage * kPage;
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = std::aligned_alloc(kPage, bytes);
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  static constexpr size_t kPage = 4096;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is kept of a matrix: for every output the terms that it sums.
//
// Outputs come in regions of kRegionOutputs, and terms in blocks. A region holds
// its entries in the order (block, output, term), and room for all of them.
struct Lists {
  int64_t outputs;
  int64_t terms;
  int64_t block;  // Terms, a multiple of kWidth.

  float* values;
  uint16_t* indices;  // Of terms within their block.
  uint32_t* starts;   // Of every output's entries within the region.

  int64_t Regions() const { return Ceil(outputs, kRegionOutputs); }
  int64_t Blocks() const { return Ceil(terms, block); }
  int64_t End(int64_t region) const {
    return std::min(outputs, (region + 1) * kRegionOutputs);
  }
  // Compress writes a vector, of which all but the first may be waste.
  int64_t Entries() const { return kRegionOutputs * terms + kWidth; }
  int64_t Starts() const { return kRegionOutputs * Blocks() + 1; }

  float* Values(int64_t region) const { return values + region * Entries(); }
  uint16_t* Indices(int64_t region) const {
    return indices + region * Entries();
  }
  uint32_t* StartsOf(int64_t region) const {
    return starts + region * Starts();
  }


  void Allocate() {
    static thread_local Scratch values_room, indices_room, starts_room;
    values = values_room.Get<float>(Regions() * Entries());
    indices = indices_room.Get<uint16_t>(Regions() * Entries());
    starts = starts_room.Get<uint32_t>(Regions() * Starts());
  }
};

// Rows lie apart in memory: asks for what is read some rows later.
template <typename T>
void Prefetch(const T* here, int64_t stride) {
  __builtin_prefetch(here + kRowsAhead * stride);
}

// Lists a region whose outputs are rows of the matrix. Entries of `also` are
// listed too, with the value zero where the mask has none.
void ListRows(const Lists& lists, int64_t region, const float* weights,
              const uint8_t* mask, const uint8_t* also) {
  float* values = lists.Values(region);
  uint16_t* indices = lists.Indices(region);
  uint32_t* starts = lists.StartsOf(region);
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  uint32_t p = 0;
  for (int64_t begin = 0; begin < lists.terms; begin += lists.block) {
    const int64_t end = std::min(lists.terms, begin + lists.block);
    for (int64_t o = 0; o < outputs; ++o) {
      *starts++ = p;
      const int64_t row = (first + o) * lists.terms;
      for (int64_t i = begin; i < end; i += kWidth) {
        const int n = static_cast<int>(std::min<int64_t>(kWidth, end - i));
        const int64_t at = row + i;
        uint32_t all = 0;
        Vector v = simd::Zero();
        if (mask) {
          Prefetch(weights + at, lists.terms);
          Prefetch(mask + at, lists.terms);
          all = simd::NonZero(mask + at, n);
          v = simd::Keep(all, simd::LoadFirst(weights + at, n));
        }
        if (also) {
          Prefetch(also + at, lists.terms);
          all |= simd::NonZero(also + at, n);
        }
        p += simd::Compress(v, all, static_cast<int>(i - begin), values + p,
                            indices + p);
      }
    }
  }
  *starts = p;
}

// Appends dealt columns one after another, from entry p on, and notes where they
// start; returns where the next one does.
uint32_t CollectColumns(int64_t columns, int64_t stride, const uint16_t* counts,
                        const float* dealt_values,
                        const uint16_t* dealt_indices, uint32_t p,
                        float* values, uint16_t* indices, uint32_t* starts) {
  for (int64_t c = 0; c < columns; ++c) {
    *starts++ = p;
    // Whole vectors: what is too much is written over, or waste at the end.
    for (int64_t i = 0; i < counts[c]; i += kWidth) {
      std::copy_n(dealt_values + c * stride + i, kWidth, values + p + i);
      std::copy_n(dealt_indices + c * stride + i, kWidth, indices + p + i);
    }
    p += counts[c];
  }
  return p;
}

// Lists a region whose outputs are columns of the matrix: reads along the rows
// of a block, and deals what is kept out to the columns.
void ListColumns(const Lists& lists, int64_t region, const float* weights,
                 const uint8_t* mask) {
  static thread_local Scratch values_room, indices_room;
  // Not a power of two, lest all columns meet in the same lines of the cache.
  const int64_t stride = lists.block + kWidth;
  float* dealt_values = values_room.Get<float>(kRegionOutputs * stride);
  uint16_t* dealt_indices = indices_room.Get<uint16_t>(kRegionOutputs * stride);
  float* values = lists.Values(region);
  uint16_t* indices = lists.Indices(region);
  uint32_t* starts = lists.StartsOf(region);
  const int64_t first = region * kRegionOutputs;
  const int64_t columns = lists.End(region) - first;
  uint32_t p = 0;
  for (int64_t begin = 0; begin < lists.terms; begin += lists.block) {
    const int64_t end = std::min(lists.terms, begin + lists.block);
    uint16_t counts[kRegionOutputs] = {0};
    for (int64_t row = begin; row < end; ++row) {
      float row_values[kRegionOutputs + kWidth];
      uint16_t row_columns[kRegionOutputs + kWidth];
      int64_t kept = 0;
      for (int64_t c = 0; c < columns; c += kWidth) {
        const int n = static_cast<int>(std::min<int64_t>(kWidth, columns - c));
        const int64_t at = row * lists.outputs + first + c;
        Prefetch(weights + at, lists.outputs);
        Prefetch(mask + at, lists.outputs);
        kept += simd::Compress(simd::LoadFirst(weights + at, n),
                               simd::NonZero(mask + at, n),
                               static_cast<int>(c), row_values + kept,
                               row_columns + kept);
      }
      for (int64_t i = 0; i < kept; ++i) {
        const int64_t c = row_columns[i];
        const int64_t at = c * stride + counts[c]++;
        dealt_values[at] = row_values[i];
        dealt_indices[at] = static_cast<uint16_t>(row - begin);
      }
    }
    p = CollectColumns(columns, stride, counts, dealt_values, dealt_indices, p,
                       values, indices, starts);
    starts += columns;
  }
  *starts = p;
}

// A packed matrix, and where the values of every row begin in its regions of
// kRegionOutputs columns.
class Ranked {
 public:
  explicit Ranked(const Packed& w) : w_(w) {
    static thread_local Scratch room;
    ranks_ = room.Get<uint32_t>(w.inputs * Regions() + 1);
    int64_t rank = 0;
    for (int64_t row = 0; row < w.inputs; ++row) {
      for (int64_t c = 0; c < w.outputs; c += 64) {
        if (c % kRegionOutputs == 0) {
          ranks_[row * Regions() + c / kRegionOutputs] =
              static_cast<uint32_t>(rank);
        }
        rank += __builtin_popcountll(Word(row, c));
      }
    }
    if (rank > w.size) {
      throw std::length_error(
          "a packed mask keeps more weights than there are values");
    }
    kept_ = rank;
  }

  const Packed& matrix() const { return w_; }
  int64_t Kept() const { return kept_; }
  bool IsSparse() const { return kept_ < 0.15 * (w_.inputs * w_.outputs); }
  int64_t Rank(int64_t row, int64_t region) const {
    return ranks_[row * Regions() + region];
  }

  // The bits of 64 columns from `column` on, a multiple of 64.
  uint64_t Word(int64_t row, int64_t column) const {
    const int64_t bytes = Ceil(w_.outputs, 8);
    uint64_t word = 0;
    std::memcpy(&word, w_.bits + row * bytes + column / 8,
                std::min<int64_t>(8, bytes - column / 8));
    const int64_t left = w_.outputs - column;
    return left < 64 ? word & ((uint64_t{1} << left) - 1) : word;
  }

 private:
  int64_t Regions() const { return Ceil(w_.outputs, kRegionOutputs); }

  const Packed w_;
  uint32_t* ranks_;
  int64_t kept_;
};

// ListRows of a packed matrix. Without values they are zero.
void ListPackedRows(const Lists& lists, int64_t region, const Ranked& w) {
  float* values = lists.Values(region);
  uint16_t* indices = lists.Indices(region);
  uint32_t* starts = lists.StartsOf(region);
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  int64_t ranks[kRegionOutputs];
  for (int64_t o = 0; o < outputs; ++o) ranks[o] = w.Rank(first + o, 0);
  uint32_t p = 0;
  for (int64_t begin = 0; begin < lists.terms; begin += lists.block) {
    const int64_t end = std::min(lists.terms, begin + lists.block);
    for (int64_t o = 0; o < outputs; ++o) {
      *starts++ = p;
      const uint32_t from = p;
      uint64_t word = 0;
      for (int64_t i = begin; i < end; i += kWidth) {
        if (i == begin || i % 64 == 0) {
          word = w.Word(first + o, i / 64 * 64) >> i % 64;
        }
        const int n = static_cast<int>(std::min<int64_t>(kWidth, end - i));
        p += simd::Compress(simd::Zero(),
                            static_cast<uint32_t>(word & ((1u << n) - 1)),
                            static_cast<int>(i - begin), values + p,
                            indices + p);
        word >>= kWidth;
      }
      if (w.matrix().values) {
        std::copy_n(w.matrix().values + ranks[o], p - from, values + from);
      }
      ranks[o] += p - from;
    }
  }
  *starts = p;
}

// ListColumns of a packed matrix.
void ListPackedColumns(const Lists& lists, int64_t region, const Ranked& w) {
  static thread_local Scratch values_room, indices_room;
  const int64_t stride = lists.block + kWidth;
  float* dealt_values = values_room.Get<float>(kRegionOutputs * stride);
  uint16_t* dealt_indices = indices_room.Get<uint16_t>(kRegionOutputs * stride);
  float* values = lists.Values(region);
  uint16_t* indices = lists.Indices(region);
  uint32_t* starts = lists.StartsOf(region);
  const int64_t first = region * kRegionOutputs;
  const int64_t columns = lists.End(region) - first;
  uint32_t p = 0;
  for (int64_t begin = 0; begin < lists.terms; begin += lists.block) {
    const int64_t end = std::min(lists.terms, begin + lists.block);
    uint16_t counts[kRegionOutputs] = {0};
    for (int64_t row = begin; row < end; ++row) {
      const float* value = w.matrix().values + w.Rank(row, region);
      for (int64_t c = 0; c < columns; c += 64) {
        for (uint64_t word = w.Word(row, first + c); word; word &= word - 1) {
          const int64_t column = c + __builtin_ctzll(word);
          const int64_t at = column * stride + counts[column]++;
          dealt_values[at] = *value++;
          dealt_indices[at] = static_cast<uint16_t>(row - begin);
        }
      }
    }
    p = CollectColumns(columns, stride, counts, dealt_values, dealt_indices, p,
                       values, indices, starts);
    starts += columns;
  }
  *starts = p;
}

// Lays out `features` of a tile of tokens [tokens, stride] as [features, tile];
// tokens that are not there are zero.
void Pack(const float* x, int64_t stride, int64_t tokens, int64_t features,
          int tile, float* packed) {
  for (int t = 0; t < tile; t += kWidth) {
    for (int64_t c = 0; c < features; c += kWidth) {
      const int n = static_cast<int>(std::min<int64_t>(kWidth, features - c));
      Vector r[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        r[i] = t + i < tokens ? simd::LoadFirst(x + (t + i) * stride + c, n)
                              : simd::Zero();
      }
      simd::Transpose(r);
      for (int i = 0; i < n; ++i) simd::Store(packed + (c + i) * tile + t, r[i]);
    }
  }
}

// The way back, for the tokens that are there.
void Unpack(const float* packed, int tile, int64_t tokens, int64_t features,
            int64_t stride, float* y) {
  for (int t = 0; t < tile && t < tokens; t += kWidth) {
    for (int64_t c = 0; c < features; c += kWidth) {
      const int n = static_cast<int>(std::min<int64_t>(kWidth, features - c));
      Vector r[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        r[i] = i < n ? simd::Load(packed + (c + i) * tile + t) : simd::Zero();
      }
      simd::Transpose(r);
      for (int i = 0; i < kWidth && t + i < tokens; ++i) {
        simd::StoreFirst(y + (t + i) * stride + c, r[i], n);
      }
    }
  }
}

// Adds a block of terms to `outputs` sums of a tile: y[o] += value * x[index].
template <int kVectors, bool kFirst>
void AddBlock(const float* x, const float* values, const uint16_t* indices,
              const uint32_t* starts, int64_t outputs, float* y) {
  constexpr int kTile = kVectors * kWidth;
  // Few accumulators would wait for one another: sum several terms apart.
  constexpr int kApart = std::min(4, simd::kForwardVectors / kVectors);
  for (int64_t o = 0; o < outputs; ++o, y += kTile) {
    uint32_t p = starts[o];
    const uint32_t end = starts[o + 1];
    if (!kFirst && p == end) continue;
    Vector sums[kApart][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      sums[0][v] = kFirst ? simd::Zero() : simd::Load(y + v * kWidth);
      for (int u = 1; u < kApart; ++u) sums[u][v] = simd::Zero();
    }
    for (; p + kApart <= end; p += kApart) {
#pragma GCC unroll 4
      for (int u = 0; u < kApart; ++u) {
        const float* row = x + indices[p + u] * kTile;
        const Vector value = simd::Broadcast(values + p + u);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[u][v] = simd::MultiplyAdd(value, simd::Load(row + v * kWidth),
                                         sums[u][v]);
        }
      }
    }
    for (; p < end; ++p) {
      const float* row = x + indices[p] * kTile;
      const Vector value = simd::Broadcast(values + p);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[0][v] = simd::MultiplyAdd(value, simd::Load(row + v * kWidth),
                                       sums[0][v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      Vector sum = sums[0][v];
      for (int u = 1; u < kApart; ++u) sum = simd::Add(sum, sums[u][v]);
      simd::Store(y + v * kWidth, sum);
    }
  }
}

template <int kVectors>
void MultiplyTile(const Lists& lists, const float* x, int64_t tokens,
                  float* y) {
  constexpr int kTile = kVectors * kWidth;
  static thread_local Scratch room;
  float* packed = room.Get<float>((lists.terms + kRegionOutputs) * kTile);
  float* sums = packed + lists.terms * kTile;
  Pack(x, lists.terms, tokens, lists.terms, kTile, packed);
  for (int64_t region = 0; region < lists.Regions(); ++region) {
    const int64_t first = region * kRegionOutputs;
    const int64_t outputs = lists.End(region) - first;
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      (b ? AddBlock<kVectors, false> : AddBlock<kVectors, true>)(
          packed + b * lists.block * kTile, lists.Values(region),
          lists.Indices(region), lists.StartsOf(region) + b * outputs, outputs,
          sums);
    }
    Unpack(sums, kTile, tokens, outputs, lists.outputs, y + first);
  }
}

// Whether a mask keeps so little, by a sample of it, that longer lists pay.
bool IsSparse(const uint8_t* mask, int64_t size) {
  constexpr int64_t kSample = 1 << 10;
  const int64_t step = std::max<int64_t>(1, size / kSample) | 1;
  int64_t kept = 0, seen = 0;
  for (int64_t i = 0; i < size; i += step, ++seen) kept += mask[i] != 0;
  return kept < 0.15 * seen;
}

// Vectors of tokens in a tile: as many as there are tokens for all workers.
int Vectors(int most, int64_t tokens, int64_t workers) {
  while (most > 1 && tokens <= most / 2 * kWidth * workers) most /= 2;
  return most;
}

// Multiplies by a matrix of which list(lists, region) lists a region.
template <typename List>
void MultiplyListed(const Workers& workers, const float* x, int64_t terms,
                    int64_t outputs, bool sparse, int64_t tokens, float* y,
                    const List& list) {
  const int most = simd::kForwardVectors / (sparse ? 2 : 1);
  const int vectors = Vectors(most, tokens, workers.number);
  Lists lists;
  lists.outputs = outputs;
  lists.terms = terms;
  // The rows of a block and their tile stay in the first-level cache.
  lists.block = vectors == simd::kForwardVectors ? 64 : 128;
  lists.Allocate();
  workers.parallel_for(lists.Regions(),
                       [&](int64_t region) { list(lists, region); });
  const int64_t tile = vectors * kWidth;
  workers.parallel_for(Ceil(tokens, tile), [&](int64_t i) {
    const int64_t first = i * tile;
    const int64_t here = std::min(tile, tokens - first);
    (vectors == 8   ? MultiplyTile<8>
     : vectors == 4 ? MultiplyTile<4>
     : vectors == 2 ? MultiplyTile<2>
                    : MultiplyTile<1>)(lists, x + first * lists.terms, here,
                                       y + first * lists.outputs);
  });
}

void Multiply(const Workers& workers, const float* x, const Matrix& w,
              bool transpose, int64_t tokens, float* y) {
  MultiplyListed(workers, x, transpose ? w.outputs : w.inputs,
                 transpose ? w.inputs : w.outputs,
                 IsSparse(w.mask, w.inputs * w.outputs), tokens, y,
                 [&](const Lists& lists, int64_t region) {
                   if (transpose) {
                     ListRows(lists, region, w.weights, w.mask, nullptr);
                   } else {
                     ListColumns(lists, region, w.weights, w.mask);
                   }
                 });
}

void MultiplyPacked(const Workers& workers, const float* x, const Packed& w,
                    bool transpose, int64_t tokens, float* y) {
  const Ranked ranked(w);
  MultiplyListed(workers, x, transpose ? w.outputs : w.inputs,
                 transpose ? w.inputs : w.outputs, ranked.IsSparse(), tokens, y,
                 [&](const Lists& lists, int64_t region) {
                   (transpose ? ListPackedRows : ListPackedColumns)(
                       lists, region, ranked);
                 });
}

// Adds a block of terms to dx of `outputs` rows, dx[o] += value * dy[index], and
// the products of their tokens, x[o] . dy[index], to the sums of the entries.
template <int kVectors, bool kFirst, bool kWithDx>
void DifferentiateBlock(const float* dy, const float* x, const float* values,
                        const uint16_t* indices, const uint32_t* starts,
                        int64_t outputs, bool first_tile, float* dx,
                        float* sums) {
  constexpr int kTile = kVectors * kWidth;
  Vector products[kWidth];
  int waiting = 0;
  uint32_t p = starts[0], done = p;
  auto add = [&](int n) {
    Vector sum = simd::SumLanes(products);
    if (!first_tile) {
      sum = simd::Add(sum, simd::LoadFirst(sums + done, n));
    }
    simd::StoreFirst(sums + done, sum, n);
    done += n;
    waiting = 0;
  };
  for (int64_t o = 0; o < outputs; ++o, x += kTile, dx += kTile) {
    const uint32_t end = starts[o + 1];
    if (!kFirst && p == end) continue;
    Vector here[kVectors], there[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      here[v] = simd::Load(x + v * kWidth);
      if (kWithDx) {
        there[v] = kFirst ? simd::Zero() : simd::Load(dx + v * kWidth);
      }
    }
    for (; p < end; ++p) {
      const float* row = dy + indices[p] * kTile;
      Vector value;
      if (kWithDx) value = simd::Broadcast(values + p);
      Vector product[2] = {simd::Zero(), simd::Zero()};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vector d = simd::LoadOnce(row + v * kWidth);
        if (kWithDx) there[v] = simd::MultiplyAdd(value, d, there[v]);
        product[v & 1] = v < 2 ? simd::Multiply(here[v], d)
                               : simd::MultiplyAdd(here[v], d, product[v & 1]);
      }
      products[waiting] = simd::Add(product[0], product[1]);
      if (++waiting == kWidth) add(kWidth);
    }
    if (kWithDx) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        simd::Store(dx + v * kWidth, there[v]);
      }
    }
  }
  if (waiting) {
    const int n = waiting;
    for (int i = n; i < kWidth; ++i) products[i] = simd::Zero();
    add(n);
  }
}

template <int kVectors, bool kWithDx>
void DifferentiateTile(const Lists& lists, const float* x, const float* dy,
                       int64_t tokens, bool first_tile, float* dx,
                       float* sums) {
  constexpr int kTile = kVectors * kWidth;
  static thread_local Scratch room;
  float* packed_dy =
      room.Get<float>((lists.terms + 2 * kRegionOutputs) * kTile);
  float* packed_x = packed_dy + lists.terms * kTile;
  float* packed_dx = packed_x + kRegionOutputs * kTile;
  Pack(dy, lists.terms, tokens, lists.terms, kTile, packed_dy);
  for (int64_t region = 0; region < lists.Regions(); ++region) {
    const int64_t first = region * kRegionOutputs;
    const int64_t outputs = lists.End(region) - first;
    Pack(x + first, lists.outputs, tokens, outputs, kTile, packed_x);
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      (b ? DifferentiateBlock<kVectors, false, kWithDx>
         : DifferentiateBlock<kVectors, true, kWithDx>)(
          packed_dy + b * lists.block * kTile, packed_x, lists.Values(region),
          lists.Indices(region), lists.StartsOf(region) + b * outputs, outputs,
          first_tile, packed_dx, sums + region * lists.Entries());
    }
    if (kWithDx) {
      Unpack(packed_dx, kTile, tokens, outputs, lists.outputs, dx + first);
    }
  }
}

// Copies floats, from aligned memory, that nobody reads before the caches have
// forgotten them.
void CopyPastCache(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % (kWidth * sizeof(float)) == 0) {
    for (; i + kWidth <= count; i += kWidth) {
      simd::Stream(to + i, simd::Load(from + i));
    }
  }
  std::copy(from + i, from + count, to + i);
}

// Writes the rows of dw of a region: the sums of its entries, zero elsewhere.
void Scatter(const Lists& lists, int64_t region, const float* sums,
             int64_t copies, int64_t copy, const uint8_t* only, float* dw) {
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  const uint16_t* indices = lists.Indices(region);
  const uint32_t* starts = lists.StartsOf(region);
  const float* of_region = sums + region * lists.Entries();
  for (int64_t b = 0; b < lists.Blocks(); ++b) {
    const int64_t begin = b * lists.block;
    const int64_t terms = std::min(lists.block, lists.terms - begin);
    for (int64_t o = 0; o < outputs; ++o, ++starts) {
      const int64_t at = (first + o) * lists.terms + begin;
      alignas(64) float row[kMostTerms] = {0};
      for (uint32_t p = starts[0]; p < starts[1]; ++p) {
        if (only && !only[at + indices[p]]) continue;
        float sum = of_region[p];
        for (int64_t i = 1; i < copies; ++i) sum += of_region[i * copy + p];
        row[indices[p]] = sum;
      }
      CopyPastCache(row, terms, dw + at);
    }
  }
  simd::Fence();
}

// Writes the gradient of the values of a region's rows.
void WritePacked(const Lists& lists, int64_t region, const float* sums,
                 int64_t copies, int64_t copy, const Ranked& w,
                 float* dvalues) {
  const int64_t first = region * kRegionOutputs;
  const int64_t outputs = lists.End(region) - first;
  const uint32_t* starts = lists.StartsOf(region);
  const float* of_region = sums + region * lists.Entries();
  int64_t ranks[kRegionOutputs];
  for (int64_t o = 0; o < outputs; ++o) ranks[o] = w.Rank(first + o, 0);
  for (int64_t b = 0; b < lists.Blocks(); ++b) {
    for (int64_t o = 0; o < outputs; ++o, ++starts) {
      float* to = dvalues + ranks[o];
      for (uint32_t p = starts[0]; p < starts[1]; ++p) {
        float sum = of_region[p];
        for (int64_t i = 1; i < copies; ++i) sum += of_region[i * copy + p];
        *to++ = sum;
      }
      ranks[o] += starts[1] - starts[0];
    }
  }
}

// Differentiates by a matrix [inputs, outputs] whose rows list(lists, region)
// lists, and has write(lists, region, sums, copies, copy) write its gradient.
template <bool kWithDx, typename List, typename Write>
void DifferentiateListed(const Workers& workers, const float* x,
                         const float* dy, int64_t inputs, int64_t outputs,
                         bool sparse, int64_t tokens, float* dx,
                         const List& list, const Write& write) {
  const int vectors =
      Vectors(simd::kBackwardVectors, tokens, workers.number);
  Lists lists;
  lists.outputs = inputs;
  lists.terms = outputs;
  lists.block = sparse ? kMostTerms : 96;
  lists.Allocate();
  workers.parallel_for(lists.Regions(),
                       [&](int64_t region) { list(lists, region); });
  const int64_t tile = vectors * kWidth;
  const int64_t tiles = Ceil(tokens, tile);
  const int64_t parts = std::min(tiles, workers.number);
  const int64_t copy = lists.Regions() * lists.Entries();
  static thread_local Scratch room;
  float* sums = room.Get<float>(parts * copy);
  // Every part sums its own tokens, so the order of summation is fixed.
  workers.parallel_for(parts, [&](int64_t part) {
    const int64_t first_tile = part * tiles / parts;
    for (int64_t i = first_tile; i < (part + 1) * tiles / parts; ++i) {
      const int64_t first = i * tile;
      const int64_t here = std::min(tile, tokens - first);
      auto run = vectors == 4   ? DifferentiateTile<4, kWithDx>
                 : vectors == 2 ? DifferentiateTile<2, kWithDx>
                                : DifferentiateTile<1, kWithDx>;
      if constexpr (simd::kBackwardVectors == 8) {
        if (vectors == 8) run = DifferentiateTile<8, kWithDx>;
      }
      run(lists, x + first * inputs, dy + first * outputs, here,
          i == first_tile, kWithDx ? dx + first * inputs : nullptr,
          sums + part * copy);
    }
  });
  workers.parallel_for(lists.Regions(), [&](int64_t region) {
    write(lists, region, sums, parts, copy);
  });
}

template <bool kWithDx>
void DifferentiateAll(const Workers& workers, const float* x, const float* dy,
                      const Matrix& w, const uint8_t* grad_mask,
                      int64_t tokens, float* dx, float* dw) {
  const int64_t size = w.inputs * w.outputs;
  if (tokens == 0) {
    std::memset(dw, 0, size * sizeof(float));
    return;
  }
  const bool same = kWithDx && (w.mask == grad_mask ||
                                !std::memcmp(w.mask, grad_mask, size));
  DifferentiateListed<kWithDx>(
      workers, x, dy, w.inputs, w.outputs, IsSparse(grad_mask, size), tokens,
      dx,
      [&](const Lists& lists, int64_t region) {
        ListRows(lists, region, w.weights, kWithDx ? w.mask : nullptr,
                 same ? nullptr : grad_mask);
      },
      [&](const Lists& lists, int64_t region, const float* sums,
          int64_t copies, int64_t copy) {
        Scatter(lists, region, sums, copies, copy, same ? nullptr : grad_mask,
                dw);
      });
}

void Differentiate(const Workers& workers, const float* x, const float* dy,
                   const Matrix& w, const uint8_t* grad_mask, int64_t tokens,
                   float* dx, float* dw) {
  (dx ? DifferentiateAll<true> : DifferentiateAll<false>)(
      workers, x, dy, w, grad_mask, tokens, dx, dw);
}

void DifferentiatePacked(const Workers& workers, const float* x,
                         const float* dy, const Packed& w, int64_t tokens,
                         float* dx, float* dvalues) {
  const Ranked ranked(w);
  std::fill(dvalues + (tokens ? ranked.Kept() : 0), dvalues + w.size, 0.f);
  if (tokens == 0) return;
  const auto list = [&](const Lists& lists, int64_t region) {
    ListPackedRows(lists, region, ranked);
  };
  const auto write = [&](const Lists& lists, int64_t region, const float* sums,
                         int64_t copies, int64_t copy) {
    WritePacked(lists, region, sums, copies, copy, ranked, dvalues);
  };
  (dx ? DifferentiateListed<true, decltype(list), decltype(write)>
      : DifferentiateListed<false, decltype(list), decltype(write)>)(
      workers, x, dy, w.inputs, w.outputs, ranked.IsSparse(), tokens, dx, list,
      write);
}

}  // namespace

extern const Kernels SPDF_KERNELS;
const Kernels SPDF_KERNELS = {SPDF_NAME, Multiply, Differentiate,
                              MultiplyPacked, DifferentiatePacked};

}  // namespace spdf
