/* Products, attention, sampling and the growth of trees on a CPU, with weights in float32 or int8.

   Invariant: a row's (token's) result depends only on that row, bit for bit: every number is computed by the same
   instructions in the same order for any number of rows. Rows are contiguous. Callers have checked shapes; all sizes
   are numbers of elements.

   In int8 an input row has one scale, and a weight has one scale per output. Before rounding, both are multiplied by a
   Hadamard matrix over blocks of `mixed` inputs. This leaves their product unchanged and spreads outliers, which would
   otherwise dominate the scale. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"
#include "vector.h"
#include "dots.h"
#include "rows.h"
#include "products.h"
#include "stored.h"
#include "attention.h"
#include "forward.h"
#include "ranking.h"
#include "growth.h"
#include "ranks.h"
