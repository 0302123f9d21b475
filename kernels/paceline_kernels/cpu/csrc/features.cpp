// Which kernels this CPU can run.
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// AMX needs the kernel's leave to use the tiles' 8 KiB of state (arch_prctl ARCH_REQ_XCOMP_PERM for XTILEDATA).
bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // bfloat16, tiles, int8
  return tiles && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

const Kernels* find_kernels(const char* name) {
  const bool best = std::strcmp(name, "auto") == 0;
#if defined(__x86_64__)
  if ((best || std::strcmp(name, "amx") == 0) && has_amx()) return &amx_kernels();
  if ((best || std::strcmp(name, "avx512") == 0) && has_avx512()) return &avx512_kernels();
  if ((best || std::strcmp(name, "avx2") == 0) && has_avx2()) return &avx2_kernels();
#endif
  return best || std::strcmp(name, "generic") == 0 ? &generic_kernels() : nullptr;
}

}  // namespace paceline
