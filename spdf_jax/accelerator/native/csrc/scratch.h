// SPDX-License-Identifier: Apache-2.0
// Scratch memory that is reused between calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace spdf {
namespace {

// A buffer that a thread reuses from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Returns page-aligned memory; previous contents may be lost.
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

}  // namespace
}  // namespace spdf
