// The kernels of one instruction set: include this with PACELINE_TABLE and PACELINE_NAME defined, compiled for that set.
#include "attend.h"
#include "int_gemm.h"
#include "split_gemm.h"
#include "rows.h"

namespace paceline {

const Kernels& PACELINE_TABLE() {
  static const Kernels table = {
      PACELINE_NAME, gemm, gemm_int, gemm_grouped, quantise, quantise_groups, {kTiles[0], kTiles[1], kTiles[2]}, kMostGroupedRows,
      rms_norm, add, gate_mul<silu>, gate_mul<gelu>, rotate, store, attend, attention_scratch, largest};
  return table;
}

}  // namespace paceline
