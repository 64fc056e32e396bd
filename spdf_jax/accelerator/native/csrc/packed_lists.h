// The lists of a packed matrix.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "lists.h"

namespace spdf {
namespace {

// A packed matrix, and where the values of every row begin in its regions of
// kRegionOutputs columns.
class Ranked {
 public:
  explicit Ranked(const Packed<Element>& w) : w_(w) {
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

  const Packed<Element>& matrix() const { return w_; }
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

  const Packed<Element> w_;
  uint32_t* ranks_;
  int64_t kept_;
};

// ListRows of a packed matrix. Without values they are zero.
void ListPackedRows(const Lists& lists, int64_t region, const Ranked& w) {
  Element* values = lists.Values(region);
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
      p = lists.Fill(p, values, indices);
    }
  }
  *starts = p;
}

// ListColumns of a packed matrix.
void ListPackedColumns(const Lists& lists, int64_t region, const Ranked& w) {
  static thread_local Scratch values_room, indices_room;
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
      const Element* value = w.matrix().values + w.Rank(row, region);
      for (int64_t c = 0; c < columns; c += 64) {
        for (uint64_t word = w.Word(row, first + c); word; word &= word - 1) {
          const int64_t column = c + __builtin_ctzll(word);
          const int64_t at = column * stride + counts[column]++;
          dealt_values[at] = *value++;
          dealt_indices[at] = static_cast<uint16_t>(row - begin);
        }
      }
    }
    p = CollectColumns(lists, columns, stride, counts, dealt_values,
                       dealt_indices, p, values, indices, starts);
    starts += columns;
  }
  *starts = p;
}

}  // namespace
}  // namespace spdf
