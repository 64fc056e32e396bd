// The kernels for the processor at hand.
#pragma once
#include <cstring>

#include "kernels.h"

namespace spdf {

// The best kernels that this processor runs, or those of a name, or null.
inline const Kernels* FindKernels(const char* name = nullptr) {
  auto wanted = [&](const Kernels& kernels) {
    return name == nullptr || !std::strcmp(name, kernels.name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted(kAvx512) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return &kAvx512;
  }
  if (wanted(kAvx2) && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return &kAvx2;
  }
#endif
  return wanted(kPortable) ? &kPortable : nullptr;
}

}  // namespace spdf
