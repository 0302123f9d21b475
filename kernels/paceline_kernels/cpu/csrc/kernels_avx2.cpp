#define PACELINE_TABLE avx2_kernels
#define PACELINE_NAME "avx2"
#include "table.h"
