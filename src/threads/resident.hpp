// The pool's threads run the library's code for as long as the process lives.
#pragma once

namespace regard {

// Pins the program or library that this code is part of, so that dlclose cannot unmap it under the
// pool's threads. The shared library is linked with -z nodelete too; a plug-in that contains the
// static one is pinned by this call alone.
void keep_code_resident();

}  // namespace regard
