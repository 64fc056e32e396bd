// SPDX-License-Identifier: Apache-2.0
// Lists of the kept entries of a matrix, for the products.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "scratch.h"
#include SPDF_ELEMENT

namespace spdf {
namespace {

constexpr int64_t kRegionOutputs = 128;
constexpr int64_t kMostTerms = 384;   // Largest number of terms in a block.
constexpr int64_t kStripRegions = 8;  // Regions with columns read together.
// Prefetch distances: in entries of a row that is read in full, in rows if only
// a strip of each is read, and in entries of the list that is written.
constexpr int64_t kEntriesAhead = 2048;
constexpr int64_t kRowsAhead = 2;
constexpr int64_t kListedAhead = 64;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lists of the kept entries of a matrix: for every output, the terms of its
// sum.
//
// Outputs are divided into regions of kRegionOutputs, and terms into blocks.
// The entries of a region in a block are in the order (output, term). The
// number of entries of an output is a multiple of kAtOnce, padded with entries
// of value zero whose index is one after the last term of a full block.
struct Lists {
  int64_t outputs;
  int64_t terms;
  int64_t block;  // Terms in a block, a multiple of kTokens.
  int64_t strip;  // Regions whose entries are contiguous.

  Element* values;
  uint16_t* indices;  // Index of each entry's term within its block.
  uint32_t* starts;   // First entry of every output, within the strip.

  int64_t Regions() const { return Ceil(outputs, kRegionOutputs); }
  int64_t Strips() const { return Ceil(Regions(), strip); }
  int64_t Blocks() const { return Ceil(terms, block); }
  int64_t End(int64_t region) const {
    return std::min(outputs, (region + 1) * kRegionOutputs);
  }
  int64_t EndOfBlock(int64_t b) const {
    return std::min(terms, (b + 1) * block);
  }
  // Capacity for all entries of a region in a block. Compress always writes a
  // whole vector, so the capacity includes one more vector.
  int64_t Room() const {
    return kRegionOutputs * (block + kAtOnce - 1) + kWidth;
  }
  int64_t Entries() const { return Strips() * strip * Blocks() * Room(); }
  // Returns the first entry of the region's strip in a block.
  int64_t First(int64_t region, int64_t b) const {
    return (region / strip * Blocks() + b) * strip * Room();
  }

  Element* Values(int64_t region, int64_t b) const {
    return values + First(region, b);
  }
  uint16_t* Indices(int64_t region, int64_t b) const {
    return indices + First(region, b);
  }
  uint32_t* Starts(int64_t region, int64_t b) const {
    return starts + (region * Blocks() + b) * (kRegionOutputs + 1);
  }
  // Returns the number of rows of tokens that entries of all blocks address.
  int64_t Rows() const { return Blocks() * RowsOfBlock(); }
  int64_t RowsOfBlock() const { return block + kAtOnce - 1; }

  // Pads the entries that end at p; returns the start of the next output.
  uint32_t Fill(uint32_t p, Element* values, uint16_t* indices) const {
    for (; p % kAtOnce; ++p) {
      values[p] = Element();
      indices[p] = static_cast<uint16_t>(block);
    }
    return p;
  }
  // Returns the end of an output's entries without the padding.
  uint32_t EndOf(uint32_t start, uint32_t end, const uint16_t* indices) const {
    while (kAtOnce > 1 && end > start && indices[end - 1] == block) --end;
    return end;
  }

  void Allocate() {
    static thread_local Scratch values_room, indices_room, starts_room;
    values = values_room.Get<Element>(Entries());
    indices = indices_room.Get<uint16_t>(Entries());
    starts = starts_room.Get<uint32_t>(Regions() * Blocks() *
                                       (kRegionOutputs + 1));
  }
};

// Returns whether so few entries are kept that larger blocks are faster.
bool IsFew(int64_t kept, int64_t of) { return kept < 0.15 * of; }

// A matrix whose entries in `mask` or `also` are listed; those only in `also`
// have the value zero. Either may be null; without a mask, weights are not
// read.
struct Masked {
  const Element* weights;
  const uint8_t* mask;
  const uint8_t* also;
  int64_t rows;
  int64_t columns;

  // Estimates sparsity from a sample of the entries.
  bool IsSparse() const {
    constexpr int64_t kSample = 1 << 10;
    const int64_t step = std::max<int64_t>(1, rows * columns / kSample) | 1;
    const uint8_t* listed = also ? also : mask;
    int64_t kept = 0, seen = 0;
    for (int64_t i = 0; i < rows * columns; i += step, ++seen) {
      kept += listed[i] != 0;
    }
    return IsFew(kept, seen);
  }

  // A row, which must be read from left to right.
  struct Row {
    const Element* weights;
    const uint8_t* mask;
    const uint8_t* also;
    int64_t ahead;

    // Returns the bits and values of the n <= kWidth entries from i on.
    // Prefetches into L2, because L1 supports few outstanding requests.
    uint32_t Read(int64_t i, int n, Vector* values) const {
      uint32_t kept = 0;
      *values = simd::Zero();
      if (mask) {
        __builtin_prefetch(weights + i + ahead, 0, 2);
        __builtin_prefetch(mask + i + ahead, 0, 2);
        kept = simd::NonZero(mask + i, n);
        *values = simd::Keep(kept, simd::LoadFirst(weights + i, n));
      }
      if (also) {
        __builtin_prefetch(also + i + ahead, 0, 2);
        kept |= simd::NonZero(also + i, n);
      }
      return kept;
    }
    // Does nothing, because Read returns the values.
    void Copy(int64_t, Element*) const {}
  };

  // Returns a row, to be read from the start of a region of columns on.
  Row RowFrom(int64_t row, int64_t, int64_t ahead) const {
    const int64_t at = row * columns;
    return {mask ? weights + at : nullptr, mask ? mask + at : nullptr,
            also ? also + at : nullptr, ahead};
  }
};

// Appends the kept entries of a row from `begin` to `end`, where `begin` gets
// the index `index`; returns the position of the next entry.
template <typename Row>
uint32_t Append(Row& row, int64_t begin, int64_t end, int64_t index, uint32_t p,
                Element* values, uint16_t* indices) {
  __builtin_prefetch(values + p + kListedAhead, 1);
  __builtin_prefetch(values + p + kListedAhead + kWidth, 1);
  __builtin_prefetch(indices + p + kListedAhead, 1);
  const uint32_t first = p;
  for (int64_t i = begin; i < end; i += kWidth) {
    const int n = static_cast<int>(std::min<int64_t>(kWidth, end - i));
    Vector v;
    const uint32_t kept = row.Read(i, n, &v);
    p += simd::Compress(v, kept, static_cast<int>(index + i - begin),
                        values + p, indices + p);
  }
  row.Copy(p - first, values + first);
  return p;
}

// Lists a region whose outputs are rows of the matrix.
template <typename M>
void ListRows(const Lists& lists, int64_t region, const M& matrix) {
  const int64_t first = region * kRegionOutputs;
  for (int64_t b = 0; b < lists.Blocks(); ++b) *lists.Starts(region, b) = 0;
  for (int64_t o = first; o < lists.End(region); ++o) {
    auto row = matrix.RowFrom(o, 0, kEntriesAhead);
    for (int64_t b = 0; b < lists.Blocks(); ++b) {
      Element* values = lists.Values(region, b);
      uint16_t* indices = lists.Indices(region, b);
      uint32_t* starts = lists.Starts(region, b) + o - first;
      const uint32_t end = Append(row, b * lists.block, lists.EndOfBlock(b), 0,
                                  starts[0], values, indices);
      starts[1] = lists.Fill(end, values, indices);
    }
  }
}

// Lists a block of a strip of regions whose outputs are columns of the matrix:
// reads along its rows, then sorts the kept entries by column.
template <typename M>
void ListColumns(const Lists& lists, int64_t strip, int64_t b,
                 const M& matrix) {
  static thread_local Scratch values_room, places_room;
  const int64_t room = lists.Room();
  Element* kept_values = values_room.Get<Element>(kStripRegions * room);
  // Positions row * kRegionOutputs + column.
  uint16_t* kept_places = places_room.Get<uint16_t>(kStripRegions * room);
  uint32_t kept[kStripRegions] = {0};
  const int64_t first = strip * kStripRegions;
  const int64_t last = std::min(first + kStripRegions, lists.Regions());
  const int64_t begin = b * lists.block;
  for (int64_t r = begin; r < lists.EndOfBlock(b); ++r) {
    auto row = matrix.RowFrom(r, first, kRowsAhead * lists.outputs);
    for (int64_t region = first; region < last; ++region) {
      const int64_t i = region - first;
      kept[i] = Append(row, region * kRegionOutputs, lists.End(region),
                       (r - begin) * kRegionOutputs, kept[i],
                       kept_values + i * room, kept_places + i * room);
    }
  }
  Element* values = lists.Values(first, b);
  uint16_t* indices = lists.Indices(first, b);
  uint32_t p = 0;
  for (int64_t region = first; region < last; ++region) {
    const int64_t at = (region - first) * room;
    const uint32_t number = kept[region - first];
    uint32_t counts[kRegionOutputs] = {0};
    for (uint32_t i = 0; i < number; ++i) {
      if (i % kWidth == 0) {
        __builtin_prefetch(values + p + i, 1);
        __builtin_prefetch(indices + p + i, 1);
      }
      ++counts[kept_places[at + i] % kRegionOutputs];
    }
    uint32_t* starts = lists.Starts(region, b);
    uint32_t next[kRegionOutputs];
    const int64_t columns = lists.End(region) - region * kRegionOutputs;
    for (int64_t c = 0; c < columns; ++c) {
      starts[c] = next[c] = p;
      p = lists.Fill(p + counts[c], values, indices);
    }
    starts[columns] = p;
    for (uint32_t i = 0; i < number; ++i) {
      const uint32_t to = next[kept_places[at + i] % kRegionOutputs]++;
      values[to] = kept_values[at + i];
      indices[to] = kept_places[at + i] / kRegionOutputs;
    }
  }
}

// Lists a matrix with its columns, or its rows, as outputs.
template <typename M>
void List(const Workers& workers, const M& matrix, bool columns, Lists* lists) {
  lists->strip = columns ? kStripRegions : 1;
  lists->Allocate();
  const int64_t strips = lists->Strips();
  workers.parallel_for(columns ? strips * lists->Blocks() : strips,
                       [&](int64_t i) {
                         if (columns) {
                           ListColumns(*lists, i % strips, i / strips, matrix);
                         } else {
                           ListRows(*lists, i, matrix);
                         }
                       });
}

}  // namespace
}  // namespace spdf
