// The pool's threads run the library's code for as long as the process lives.
#pragma once

namespace regard {

// Pins the program or library that contains this code, so that dlclose cannot unmap it under the
// pool's threads. The shared library is also linked with -z nodelete; a plug-in that contains the
// static library is pinned by this call alone.
void keep_code_resident();

}  // namespace regard
