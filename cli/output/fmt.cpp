// Compiles {fmt} into the program once, so that the tool needs no shared library.
#include <fmt/format-inl.h>

namespace fmt::detail {
template thousands_sep_result<char> thousands_sep_impl<char>(locale_ref);
template char decimal_point_impl<char>(locale_ref);
}  // namespace fmt::detail
