#define PACELINE_TABLE amx_kernels
#define PACELINE_NAME "amx"
#include "table.h"
