// SPDX-License-Identifier: Apache-2.0
// Selection of the kernels for the current processor.
#pragma once
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spdf {

// Returns the best kernels that this processor supports, or those with the
// given name, or null if it does not support them.
template <typename Element>
const Kernels<Element>* FindKernels(const char* name = nullptr);

template <>
inline const Kernels<float>* FindKernels(const char* name) {
  auto wanted = [&](const Kernels<float>& kernels) {
    return name == nullptr || !std::strcmp(name, kernels.name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted(kAvx512) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return &kAvx512blocks;
  }
  if (wanted(kAvx2) && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return &kAvx2blocks;
  }
#endif
  return wanted(kPortable) ? &kPortable : nullptr;
}

// Returns "amx" if tiles are used, "" if the processor has none, or else the
// reason. The operating system grants tiles to a process that asks for them.
inline const char* MatrixUnit() {
#if defined(__x86_64__)
#ifdef SPDF_TILES_PERMITTED  // In tests.
  const bool exists = true, permitted = SPDF_TILES_PERMITTED;
#else
  constexpr unsigned kTilesAndBfloat16 = 1u << 24 | 1u << 22;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d = 0;
  const bool exists = __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
                      (d & kTilesAndBfloat16) == kTilesAndBfloat16;
  static const bool permitted =
      exists && !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#endif
  if (!exists) return "";
  if (&kAmx == nullptr) {
    return "AMX is not used: the compiler does not support it; install g++ 11 "
           "or later, or set the environment variable CXX to its path.";
  }
  if (!permitted) {
    return "AMX is not used: the operating system refused its registers "
           "(arch_prctl); use Linux 5.16 or later, or allow the call in the "
           "container.";
  }
  return "amx";
#else
  return "";
#endif
}

// The kernels for bfloat16 are used together with the AVX-512 ones for floats.
template <>
inline const Kernels<Bfloat16>* FindKernels(const char* name) {
#if defined(__x86_64__)
  const Kernels<float>* floats = FindKernels<float>(name);
  // Reads CPUID, because __builtin_cpu_supports of older compilers does not
  // know the feature.
  unsigned a = 0, b, c, d;
  const bool runs = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  if (runs && floats == &kAvx512blocks && &kAvx512bf16 != nullptr) {
    return std::strcmp(MatrixUnit(), "amx") ? &kAvx512bf16blocks : &kAmx;
  }
#endif
  static_cast<void>(name);
  return nullptr;
}

}  // namespace spdf
