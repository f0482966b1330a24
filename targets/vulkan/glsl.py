"""A GPU kernel as a GLSL compute shader.

Buffers become bindings 0, 1, … of set 0, scalars the push constants, both in the order of the kernel's arguments.
Statements are written here, expressions in `glsl_expressions`. What has no GLSL is refused by name. Knows nothing of
SPIR-V.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflashc.runtime.errors import TargetError
from dflashc.targets.gpu.builder import Kernel
from dflashc.targets.vulkan.glsl_expressions import Expressions
from dflashc.targets.vulkan.glsl_types import extensions_of, spell

_SCALAR_TYPES = {"i32": "int", "f32": "float"}
_THREAD_AXES = {"threadIdx.x": "gl_LocalInvocationID.x", "blockIdx.x": "gl_WorkGroupID.x"}
_SERIAL = 0
_BARRIER = ("controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer | "
            "gl_StorageSemanticsShared, gl_SemanticsAcquireRelease);")


def write_shader(kernel: Kernel, function: Any, packed_dot: bool) -> str:
    """The source of a compute shader with entry point `main`.

    Parameters
    ----------
    kernel : Kernel
        Whose arguments and threads the shader has.
    function : tirx.PrimFunc
        The kernel's function after `targets.gpu.lowering`.
    packed_dot : bool
        Whether dot products of four bytes use SPIR-V's instruction (SPV_KHR_integer_dot_product) or plain arithmetic.
    """
    return _Shader(kernel, packed_dot).write(function)


class _Shader(Expressions):
    def __init__(self, kernel: Kernel, packed_dot: bool) -> None:
        super().__init__(packed_dot)
        self._kernel = kernel
        self._shared: list[str] = []
        self._written: set[Any] = set()
        self._has_barrier = False

    def write(self, function: Any) -> str:
        buffers = [a for a in self._kernel.arguments if not a.is_scalar]
        scalars = [a for a in self._kernel.arguments if a.is_scalar]
        for parameter in function.params[: len(buffers)]:
            self.name(parameter, parameter.name)
        for parameter in function.params[len(buffers) :]:
            self.spelling[parameter] = f"scalars.{self.names.new(parameter.name)}"
        self.statement(function.body)
        blocks = [line for binding, (parameter, argument) in enumerate(zip(function.params, buffers, strict=False))
                  for line in self._buffer_blocks(binding, parameter, argument.kind)]
        members = [f"  {_SCALAR_TYPES[a.kind]} {self.spelling[p].removeprefix('scalars.')};"
                   for p, a in zip(function.params[len(buffers) :], scalars, strict=True)]
        push_constants = ["layout(push_constant) uniform Scalars {", *members, "} scalars;"] if scalars else []
        return "\n".join([
            "#version 460", *(f"#extension {name} : require" for name in sorted(self.extensions)),
            f"layout(local_size_x = {self._kernel.threads}) in;", *blocks, *push_constants, *self._shared,
            *self.helpers.values(), "void main() {", *self.lines, "}", ""])

    def _buffer_blocks(self, binding: int, parameter: Any, element: str) -> Iterator[str]:
        """One block per way in which the buffer is accessed, all on the same binding."""
        self.extensions.update(extensions_of(element))
        views = sorted(lanes for p, lanes in self.views if p == parameter)
        name, written = self.spelling[parameter], parameter in self._written
        words = [] if written and views else ["restrict"]
        if not written:
            words.append("readonly")
        elif self._has_barrier and parameter in self.read:
            words.append("coherent")  # what one thread stores before a barrier, others load after it
        for lanes in (1, *views):
            suffix = f"_{lanes}" if lanes > 1 else ""
            yield (f"layout(std430, set = 0, binding = {binding}) {' '.join(words)} buffer B{binding}{suffix} "
                   f"{{ {spell(element, lanes)} {name}{suffix}[]; }};")

    def statement(self, s: Any) -> None:
        kind = type(s).__name__
        writer = getattr(self, f"_write_{kind}", None)
        if writer is None:
            raise TargetError(f"statement {kind} found in kernel {self._kernel.name}; there is no GLSL for it")
        writer(s)

    @contextmanager
    def _block(self, opening: str) -> Iterator[None]:
        self.line(f"{opening} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")

    def _write_SeqStmt(self, s: Any) -> None:
        for part in s.seq:
            self.statement(part)

    def _write_DeclBuffer(self, s: Any) -> None:
        """A parameter under the name of its buffer."""
        parameter = s.data.args[0] if hasattr(s.data, "args") else s.data
        if parameter not in self.spelling:
            raise TargetError(f"buffer {s.buffer.name} found in kernel {self._kernel.name}, which is no parameter")
        self.parameter_of[s.buffer] = parameter

    def _write_AllocBuffer(self, s: Any) -> None:
        buffer, scope = s.buffer, s.buffer.scope()
        element = str(buffer.dtype)
        self.extensions.update(extensions_of(element))
        (size,) = buffer.shape
        declaration = f"{spell(element)} {self.name(buffer, buffer.name)}[{int(size)}];"
        if scope == "local":
            self.line(declaration)
        elif scope == "shared":
            self._shared.append(f"shared {declaration}")
        else:
            raise TargetError(f"memory of scope {scope!r} found in kernel {self._kernel.name}; expected local, shared")

    def _write_AttrStmt(self, s: Any) -> None:
        if s.attr_key != "thread_extent" or s.node.thread_tag not in _THREAD_AXES:
            raise TargetError(f"attribute {s.attr_key} found in kernel {self._kernel.name}; there is no GLSL for it")
        if s.node.var not in self.spelling:
            name = self.name(s.node.var, s.node.var.name)
            self.line(f"int {name} = int({_THREAD_AXES[s.node.thread_tag]});")
        self.statement(s.body)

    def _write_For(self, s: Any) -> None:
        if int(s.kind) != _SERIAL:
            raise TargetError(f"a loop of kind {int(s.kind)} found in kernel {self._kernel.name}; serial ones expected")
        kind, first, extent = self.type_of(s.loop_var), self.text(s.min), self.text(s.extent)
        name = self.name(s.loop_var, s.loop_var.name)
        step = f"{name} += {self.text(s.step)}" if s.step is not None else f"++{name}"
        with self._block(f"for ({kind} {name} = {first}; {name} < {first} + {extent}; {step})"):
            self.statement(s.body)

    def _write_While(self, s: Any) -> None:
        with self._block("while (true)"):
            self.line(f"if (!{self.text(s.condition)}) break;")
            self.statement(s.body)

    def _write_Break(self, s: Any) -> None:
        self.line("break;")

    def _write_Continue(self, s: Any) -> None:
        self.line("continue;")

    def _write_Bind(self, s: Any) -> None:
        value = self.text(s.value)
        self.line(f"{self.type_of(s.var)} {self.name(s.var, s.var.name)} = {value};")

    def _write_IfThenElse(self, s: Any) -> None:
        with self._block(f"if ({self.text(s.condition)})"):
            self.statement(s.then_case)
        if s.else_case is not None:
            with self._block("else"):
                self.statement(s.else_case)

    def _write_BufferStore(self, s: Any) -> None:
        if s.buffer in self.parameter_of:
            self._written.add(self.parameter_of[s.buffer])
        value = self.text(s.value)
        self.line(f"{self.element(s.buffer, s.indices[0], s.value)} = {value};")

    def _write_Evaluate(self, s: Any) -> None:
        if type(s.value).__name__ == "IntImm":
            return
        if type(s.value).__name__ == "Call" and s.value.op.name == "tirx.tvm_storage_sync":
            self._has_barrier = True
            self.extensions.add("GL_KHR_memory_scope_semantics")
            self.line(_BARRIER)
            return
        self.line(f"{self.text(s.value)};")
