// What is kept of a matrix, listed for the products.
#pragma once
#include <algorithm>
#include <cstdint>

#include "scratch.h"
#include SPDF_ELEMENT

namespace spdf {
namespace {

constexpr int64_t kRegionOutputs = 128;
constexpr int64_t kMostTerms = 384;  // Of a block.
constexpr int64_t kRowsAhead = 8;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is kept of a matrix: for every output the terms that it sums.
//
// Outputs come in regions of kRegionOutputs, and terms in blocks. A region holds
// its entries in the order (block, output, term), and room for all of them. The
// entries of an output in a block are a multiple of kAtOnce: where there are too
// few, zeros follow, times a term after the last one of a whole block.
struct Lists {
  int64_t outputs;
  int64_t terms;
  int64_t block;  // Terms, a multiple of kTokens.

  Element* values;
  uint16_t* indices;  // Of terms within their block.
  uint32_t* starts;   // Of every output's entries within the region.

  int64_t Regions() const { return Ceil(outputs, kRegionOutputs); }
  int64_t Blocks() const { return Ceil(terms, block); }
  int64_t End(int64_t region) const {
    return std::min(outputs, (region + 1) * kRegionOutputs);
  }
  // Compress writes a vector, of which all but the first may be waste.
  int64_t Entries() const {
    return kRegionOutputs * (terms + Blocks() * (kAtOnce - 1)) + kWidth;
  }
  int64_t Starts() const { return kRegionOutputs * Blocks() + 1; }

  Element* Values(int64_t region) const {
    return values + region * Entries();
  }
  uint16_t* Indices(int64_t region) const {
    return indices + region * Entries();
  }
  uint32_t* StartsOf(int64_t region) const {
    return starts + region * Starts();
  }
  // Rows of tokens that entries of all blocks may name.
  int64_t Rows() const { return Blocks() * RowsOfBlock(); }
  int64_t RowsOfBlock() const { return block + kAtOnce - 1; }

  // Appends zeros to what ends at p, and returns where the next output starts.
  uint32_t Fill(uint32_t p, Element* values, uint16_t* indices) const {
    for (; p % kAtOnce; ++p) {
      values[p] = Element();
      indices[p] = static_cast<uint16_t>(block);
    }
    return p;
  }
  // The end of an output's entries, less what was appended.
  uint32_t EndOf(uint32_t start, uint32_t end, const uint16_t* indices) const {
    while (kAtOnce > 1 && end > start && indices[end - 1] == block) --end;
    return end;
  }

  void Allocate() {
    static thread_local Scratch values_room, indices_room, starts_room;
    values = values_room.Get<Element>(Regions() * Entries());
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
void ListRows(const Lists& lists, int64_t region, const Element* weights,
              const uint8_t* mask, const uint8_t* also) {
  Element* values = lists.Values(region);
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
      p = lists.Fill(p, values, indices);
    }
  }
  *starts = p;
}

// Appends dealt columns one after another, from entry p on, and notes where they
// start; returns where the next one does.
uint32_t CollectColumns(const Lists& lists, int64_t columns, int64_t stride,
                        const uint16_t* counts, const Element* dealt_values,
                        const uint16_t* dealt_indices, uint32_t p,
                        Element* values, uint16_t* indices, uint32_t* starts) {
  for (int64_t c = 0; c < columns; ++c) {
    *starts++ = p;
    // Whole vectors: what is too much is written over, or waste at the end.
    for (int64_t i = 0; i < counts[c]; i += kWidth) {
      std::copy_n(dealt_values + c * stride + i, kWidth, values + p + i);
      std::copy_n(dealt_indices + c * stride + i, kWidth, indices + p + i);
    }
    p = lists.Fill(p + counts[c], values, indices);
  }
  return p;
}

// Lists a region whose outputs are columns of the matrix: reads along the rows
// of a block, and deals what is kept out to the columns.
void ListColumns(const Lists& lists, int64_t region, const Element* weights,
                 const uint8_t* mask) {
  static thread_local Scratch values_room, indices_room;
  // Not a power of two, lest all columns meet in the same lines of the cache.
  const int64_t stride = lists.block + kWidth;
  Element* dealt_values = values_room.Get<Element>(kRegionOutputs * stride);
  uint16_t* dealt_indices = indices_room.Get<uint16_t>(kRegionOutputs * stride);
  Element* values = lists.Values(region);
  uint16_t* indices = lists.Indices(region);
  uint32_t* starts = lists.StartsOf(region);
  const int64_t first = region * kRegionOutputs;
  const int64_t columns = lists.End(region) - first;
  uint32_t p = 0;
  for (int64_t begin = 0; begin < lists.terms; begin += lists.block) {
    const int64_t end = std::min(lists.terms, begin + lists.block);
    uint16_t counts[kRegionOutputs] = {0};
    for (int64_t row = begin; row < end; ++row) {
      Element row_values[kRegionOutputs + kWidth];
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
    p = CollectColumns(lists, columns, stride, counts, dealt_values,
                       dealt_indices, p, values, indices, starts);
    starts += columns;
  }
  *starts = p;
}

// Whether a mask keeps so little, by a sample of it, that longer lists pay.
bool IsSparse(const uint8_t* mask, int64_t size) {
  constexpr int64_t kSample = 1 << 10;
  const int64_t step = std::max<int64_t>(1, size / kSample) | 1;
  int64_t kept = 0, seen = 0;
  for (int64_t i = 0; i < size; i += step, ++seen) kept += mask[i] != 0;
  return kept < 0.15 * seen;
}

}  // namespace
}  // namespace spdf
