// The tensors that `regard attend` reads, arranged as the library wants them.
#pragma once

#include <map>

#include "command_line/arguments.hpp"
#include "tensors/array.hpp"

namespace regard::cli {

struct AttendInputs {
  std::map<std::string, Array> arrays;  // own the memory of what follows
  Attention attention;
  Tensor dout, dlse;
  int rank = 4;             // of q in the file; results are written with the same
  bool rows_first = false;  // layout bshd
  bool packed = false;

  // A result in the file's shape, and its view as the library wants it.
  Array like_q(Index last, Type type) const;
  Tensor view(const Array& array) const;  // of q, k, v, out and their gradients
  Array like_lse() const;
  Tensor lse_view(const Array& array) const;
};

AttendInputs read_inputs(const AttendArguments& arguments);

}  // namespace regard::cli
