#define PACELINE_TABLE avx512_kernels
#define PACELINE_NAME "avx512"
#include "table.h"
