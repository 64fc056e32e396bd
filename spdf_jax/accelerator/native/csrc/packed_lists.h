// SPDX-License-Identifier: Apache-2.0
// Access to the rows of a packed matrix, for its lists.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "lists.h"

namespace spdf {
namespace {

// A packed matrix, with the index of the first value of every row in each
// region of kRegionOutputs columns.
class Ranked {
 public:
  const int64_t rows;
  const int64_t columns;

  explicit Ranked(const Packed<Element>& w)
      : rows(w.inputs), columns(w.outputs), w_(w) {
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

  int64_t Kept() const { return kept_; }
  bool IsSparse() const { return IsFew(kept_, rows * columns); }
  int64_t Rank(int64_t row, int64_t region) const {
    return ranks_[row * Regions() + region];
  }

  // A row, which must be read from left to right.
  struct Row {
    const uint8_t* bits;
    const Element* values;  // Next unread value; null: all values are zero.

    // Returns the bits of the n <= kWidth entries from i on; values are zero.
    uint32_t Read(int64_t i, int n, Vector* zeros) const {
      *zeros = simd::Zero();
      uint32_t kept = bits[i / 8];
      if (n > 8) kept |= uint32_t{bits[i / 8 + 1]} << 8;
      return kept >> i % 8 & ((1u << n) - 1);
    }
    // Copies the next `number` values, those of the entries read last.
    void Copy(int64_t number, Element* to) {
      if (values == nullptr) return;
      std::copy_n(values, number, to);
      values += number;
    }
  };

  Row RowFrom(int64_t row, int64_t region, int64_t) const {
    return {w_.bits + row * Ceil(w_.outputs, 8),
            w_.values ? w_.values + Rank(row, region) : nullptr};
  }

 private:
  int64_t Regions() const { return Ceil(w_.outputs, kRegionOutputs); }

  // Returns the bits of 64 columns from `column` on, a multiple of 64.
  uint64_t Word(int64_t row, int64_t column) const {
    const int64_t bytes = Ceil(w_.outputs, 8);
    uint64_t word = 0;
    std::memcpy(&word, w_.bits + row * bytes + column / 8,
                std::min<int64_t>(8, bytes - column / 8));
    const int64_t left = w_.outputs - column;
    return left < 64 ? word & ((uint64_t{1} << left) - 1) : word;
  }

  const Packed<Element> w_;
  uint32_t* ranks_;
  int64_t kept_;
};

}  // namespace
}  // namespace spdf
