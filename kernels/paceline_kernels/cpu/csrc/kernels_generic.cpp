#define PACELINE_TABLE generic_kernels
#define PACELINE_NAME "generic"
#include "table.h"
