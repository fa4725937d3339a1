"""The binding's declarations of XLA's interface are those of the installed jaxlib's header."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

BINDING = Path(__file__).resolve().parents[2] / "python" / "binding"

# Ours, XLA's, and fields by both names.
STRUCTS = {
    ("Extension", "XLA_FFI_Extension_Base XLA_FFI_InternalExtension"): "size:struct_size type next",
    ("Version", "XLA_FFI_Api_Version"):
        "size:struct_size extension:extension_start major:major_version minor:minor_version",
    ("Metadata", "XLA_FFI_Metadata"): "size:struct_size version:api_version traits",
    ("MetadataExtension", "XLA_FFI_Metadata_Extension"): "base:extension_base metadata",
    ("Buffer", "XLA_FFI_Buffer"): "size:struct_size type:dtype data rank sizes:dims",
    ("Text", "XLA_FFI_ByteSpan"): "data:ptr size:len",
    ("Scalar", "XLA_FFI_Scalar"): "type:dtype value",
    ("Operands", "XLA_FFI_Args"): "size:struct_size count:size kinds:types values:args",
    ("Operands", "XLA_FFI_Rets"): "size:struct_size count:size kinds:types values:rets",
    ("Attributes", "XLA_FFI_Attrs"):
        "size:struct_size count:size kinds:types names values:attrs",
    ("MakeFailure", "XLA_FFI_Error_Create_Args"): "size:struct_size message code:errc",
    ("DestroyFailure", "XLA_FFI_Error_Destroy_Args"): "size:struct_size failure:error",
    ("Schedule", "XLA_FFI_ThreadPool_Schedule_Args"): "size:struct_size context:ctx task data",
    ("CountThreads", "XLA_FFI_ThreadPool_NumThreads_Args"):
        "size:struct_size context:ctx threads:num_threads",
    ("GetStream", "XLA_FFI_Stream_Get_Args"): "size:struct_size context:ctx stream",
    ("AllocateMemory", "XLA_FFI_DeviceMemory_Allocate_Args"):
        "size:struct_size context:ctx bytes:size alignment data",
    ("FreeMemory", "XLA_FFI_DeviceMemory_Free_Args"):
        "size:struct_size context:ctx bytes:size data",
    ("GetDevice", "XLA_FFI_DeviceOrdinal_Get_Args"):
        "size:struct_size context:ctx ordinal:device_ordinal",
    ("Api", "XLA_FFI_Api"):
        "size:struct_size extension:extension_start version:api_version internal:internal_api "
        "make_failure:XLA_FFI_Error_Create destroy_failure:XLA_FFI_Error_Destroy "
        "schedule:XLA_FFI_ThreadPool_Schedule count_threads:XLA_FFI_ThreadPool_NumThreads "
        "get_stream:XLA_FFI_Stream_Get "
        "allocate_memory:XLA_FFI_DeviceMemory_Allocate free_memory:XLA_FFI_DeviceMemory_Free "
        "get_device:XLA_FFI_DeviceOrdinal_Get",
    ("CallFrame", "XLA_FFI_CallFrame"):
        "size:struct_size extension:extension_start api context:ctx stage operands:args "
        "results:rets attributes:attrs",
}
CONSTANTS = {
    "kMajor": "XLA_FFI_API_MAJOR", "kExecute": "XLA_FFI_ExecutionStage_EXECUTE",
    "kMetadata": "XLA_FFI_Extension_Metadata", "kBuffer": "XLA_FFI_ArgType_BUFFER",
    "kScalar": "XLA_FFI_AttrType_SCALAR", "kString": "XLA_FFI_AttrType_STRING",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "kUnavailable": "XLA_FFI_Error_Code_UNAVAILABLE", "kUnknown": "XLA_FFI_Error_Code_UNKNOWN",
    **{f"k{name}": f"XLA_FFI_DataType_{name.upper()}" for name in
       ("Pred", "S32", "S64", "U32", "F16", "F32", "F64", "BF16")},
}


def test_declarations_are_the_installed_headers(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla_abi.hpp"',
             "namespace ours = regard::python::xla;",
             "#define SAME(a, b) static_assert((a) == (b), #a)",
             "SAME(ours::kMinor <= XLA_FFI_API_MINOR, true);"]
    lines += [f"SAME(int(ours::{one}), int({theirs}));" for one, theirs in CONSTANTS.items()]
    for (one, names), fields in STRUCTS.items():
        theirs = next(name for name in names.split() if f"struct {name} {{" in header)
        for field in fields.split():
            a, _, b = field.partition(":")
            b = b or a
            lines.append(f"SAME(offsetof(ours::{one}, {a}), offsetof({theirs}, {b}));")
            if one not in ("Metadata", "Api", "CallFrame"):
                lines.append(f"SAME(sizeof(ours::{one}::{a}), sizeof({theirs}::{b}));")
        if one not in ("Metadata", "Api", "CallFrame"):  # these grow
            lines.append(f"SAME(sizeof(ours::{one}), sizeof({theirs}));")
    source = tmp_path / "same.cpp"
    source.write_text("\n".join(lines))
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-I", jax.ffi.include_dir(),
                           "-I", BINDING, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
