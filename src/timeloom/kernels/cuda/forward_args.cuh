// What a forward sweep is given.
#pragma once
#include "cell.cuh"
typedef long long index_t;
#define ROW (INPUTS + DROPPED)                    // vectors of a row: the mask is in it, too, before what zoneout reads
#define PLACE(input) ((input) + ((input) < INPUTS - PARTS * ZONED ? 0 : DROPPED))   // which one of them an input is

struct ForwardArgs {
  const float *inputs;                            // (T, B, ROW n)
  const float *mask;                              // (B, n), if DROPPED: what h is multiplied by before the products
  const float *weights;                           // (PRODUCTS n, n)
  const float *vectors;                           // (VECTORS, n): what the cell has for each unit
  const float *origin;                            // (B, PARTS n): where a lead begins, and where resets put the state back to
  float *starts;                                  // (rows, PARTS n): in; with a lead out: the state it found
  float *ends;                                    // (rows, PARTS n): out
  float *decay;                                   // (rows, PARTS n), if DECAY: what each unit keeps of itself over its row
  float *states[2];                               // (T + 1, B, n) each, if STORES: the state after step t at t + 1
  float *saved;                                   // (T, B, SAVED n), if STORES > 1: for the adjoint
  const index_t *sequence, *begin, *end;          // (rows)
  const unsigned char *resets;                    // (T, B), if RESETS
  const float *unless;                            // a certificate or NULL: nothing is swept where it is within its limit
  int steps, batch, rows, lead;
  float limit;
};
