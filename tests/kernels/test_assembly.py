"""PTX that kernels contain as text, which the interpreter does not run, run here over every byte of codes."""

import importlib.util
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (there are no wheels for this platform)", allow_module_level=True)

from vllm_spac.kernels import dequantise
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.dequantise import dequantise as twin

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BYTES = torch.arange(256, dtype=torch.int64)
NIBBLES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
WHOLE = 0xFFFFFFFF


def halves(register: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The two numbers of 16 bits in a register, the low one first."""
    parts = ((register >> shift) & 0xFFFF for shift in (0, 16))
    return [part.to(torch.int32).to(torch.int16).view(dtype) for part in parts]


def joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return sum((part.view(torch.int16).to(torch.int64) & 0xFFFF) << at for part, at in ((low, 0), (high, 16)))


def floats(register: torch.Tensor) -> torch.Tensor:
    return register.to(torch.int64).to(torch.int32).view(torch.float32)


class Machine:
    """Runs the few instructions that the texts have, over registers of as many lanes as they are given."""

    def __init__(self, text: str, **inputs: torch.Tensor) -> None:
        self.registers: dict[str, torch.Tensor] = {f"${name[1:]}": value for name, value in inputs.items()}
        for line in re.split(r"[;{}]\s*", re.sub(r"\{([^;{}]*)\}", r"(\1)", text)):
            if line and not line.startswith(".reg"):
                name, _, rest = line.strip().partition(" ")
                self.step(name, *re.findall(r"\([^)]*\)|[$\w]+", rest))

    def value(self, operand: str) -> torch.Tensor:
        return self.registers[operand] if operand in self.registers else torch.tensor(int(operand, 0))

    def step(self, name: str, target: str, *operands: str) -> None:
        if name == "mov.b32" and target.startswith("("):
            whole = self.value(operands[0])
            for place, part in enumerate(re.findall(r"\w+", target)):
                self.registers[part] = (whole >> (8 * place)) & 255
            return
        given = [self.value(operand) for operand in operands]
        self.registers[target] = getattr(self, name.replace(".", "_"))(*given)

    def mov_b32(self, a):
        return a

    def shl_b32(self, a, b):
        return (a << b) & WHOLE

    def shr_u32(self, a, b):
        return a >> b

    def and_b32(self, a, b):
        return a & b

    def lop3_b32(self, a, b, c, table):
        assert table == 0xEA
        return (a & b) | c

    def prmt_b32(self, a, b, selector):
        chosen = [(int(selector) >> (4 * place)) & 15 for place in range(4)]
        assert max(chosen) < 8, "no sign is spread"
        return sum((((a | (b << 32)) >> (8 * byte)) & 255) << (8 * place) for place, byte in enumerate(chosen))

    def fma(self, dtype, a, b, c):
        """In float64 a product of two numbers of 16 bits is exact, and so is its sum with what is added here."""
        parts = [[half.double() for half in halves(each, dtype)] for each in (a, b, c)]
        found = [(x * y + z).to(torch.float32).to(dtype) for x, y, z in zip(*parts, strict=True)]
        return joined(*torch.broadcast_tensors(*found))

    def fma_rn_bf16x2(self, a, b, c):
        return self.fma(torch.bfloat16, a, b, c)

    def fma_rn_f16x2(self, a, b, c):
        return self.fma(torch.float16, a, b, c)

    def mul_rn_f32(self, a, b):
        found = floats(a) * (b if b.dtype == torch.float32 else floats(b))
        return found.view(torch.int32).to(torch.int64) & WHOLE

    def cvt_rn_bf16x2_f32(self, high, low):
        return joined(floats(low).bfloat16(), floats(high).bfloat16())

    def cvt_rn_f16x2_f32(self, high, low):
        return joined(floats(low).half(), floats(high).half())

    def cvt_rn_bf16x2_e2m1x2(self, byte):
        return joined(NIBBLES[byte & 15].bfloat16(), NIBBLES[byte >> 4].bfloat16())


def of_every_byte(name: str, kind: str) -> torch.Tensor:
    """[256] registers of the pairs of each byte, from any of the four places of a word."""
    found = []
    for place in range(4):
        others = (BYTES * 37 + 11) & 255
        word = sum((BYTES if at == place else others) << (8 * at) for at in range(4))
        found.append(Machine(dequantise.ASSEMBLY[name, kind], _4=word).registers[f"${place}"])
    assert all(torch.equal(each, found[0]) for each in found), "the bytes beside it do not matter"
    return found[0]


def pairs_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return joined(values.to(dtype), values.to(dtype))


def same(found: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> bool:
    """NaN of any bits is NaN."""
    dtype = low.dtype
    return all(
        torch.equal(half.view(torch.int16).where(~half.isnan(), 0), goal.view(torch.int16).where(~goal.isnan(), 0))
        and torch.equal(half.isnan(), goal.isnan())
        for half, goal in zip(halves(found, dtype), (low, high), strict=True)
    )


def scales(dtype: torch.dtype) -> torch.Tensor:
    """Usual ones, ties, the least and the greatest."""
    rng = torch.Generator().manual_seed(0)
    usual = torch.rand(500, generator=rng) * 0.1
    edges = torch.tensor([torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 8, torch.finfo(dtype).max])
    return torch.cat([usual, edges, torch.tensor([0.0, 1.0, 3.0])]).to(dtype)


@pytest.mark.parametrize("zero", [0, 7, 8, 15, 16])
@pytest.mark.parametrize("kind", DTYPES)
def test_int4(kind, zero):
    """All bytes and many scales: T((nibble - zero) * scale), rounded once."""
    dtype = DTYPES[kind]
    base = {"bf16": 0xC300C300, "fp16": 0xE400E400}[kind]
    every, less = of_every_byte("int4", kind)[:, None], torch.tensor(base | zero << 16 | zero)
    scale = scales(dtype)
    machine = Machine(dequantise.ASSEMBLY["less", kind], _1=every, _2=joined(scale, scale)[None, :], _3=less)
    nibbles = [((BYTES & 15) - zero)[:, None].double(), ((BYTES >> 4) - zero)[:, None].double()]
    goal = [(each * scale.double()).float().to(dtype) for each in nibbles]
    found = halves(machine.registers["$0"], dtype)  # of whatever sign of zero: it adds nothing to a sum
    assert all(torch.equal(half + 0, each + 0) for half, each in zip(found, goal, strict=True))


@pytest.mark.parametrize("name", ["e2m1", "native e2m1"])
def test_e2m1(name):
    assert same(of_every_byte(name, "bf16"), NIBBLES[BYTES & 15].bfloat16(), NIBBLES[BYTES >> 4].bfloat16())


def test_mxfp4_is_its_twin():
    """All bytes and all exponents, 2**-127 and NaN among them."""
    every = of_every_byte("e2m1", "bf16")[:, None]
    exponents = torch.arange(256, dtype=torch.int64)
    half = torch.where(exponents == 0, 0x40, torch.where(exponents == 255, 0x7FC0, exponents << 7))
    machine = Machine(dequantise.ASSEMBLY["times", "bf16"], _1=every, _2=(half | half << 16)[None, :])
    for exponent in exponents.tolist():
        word = torch.full((1, 4), exponent, dtype=torch.uint8).repeat(4, 4).view(torch.int32)
        kind = Format("e2m1", 32)
        words = word[:1, :1].expand(kind.scale_shape(1, 512)).contiguous()
        goal = twin(kind, BYTES.to(torch.uint8)[None], words, 1, 512, torch.bfloat16)[0]
        assert same(machine.registers["$0"][:, exponent], goal[::2], goal[1::2]), exponent


@pytest.mark.parametrize("kind", DTYPES)
def test_nvfp4(kind):
    """All bytes and many scales of float32: rounded to float32, then to T."""
    scale = torch.cat(
        [torch.rand(500, generator=torch.Generator().manual_seed(1)), torch.tensor([0.0, 2.0**-140, 3e38])]
    )
    every = of_every_byte("e2m1", "bf16")[:, None]
    every, scale = torch.broadcast_tensors(every, scale[None, :])
    machine = Machine(dequantise.ASSEMBLY["rounded", kind], _1=every.contiguous(), _2=scale.contiguous())
    low, high = ((NIBBLES[each][:, None] * scale).to(DTYPES[kind]) for each in (BYTES & 15, BYTES >> 4))
    assert same(machine.registers["$0"], low, high)


BUGS = [
    ("int4", "bf16", "0x2420", "0x2421"), ("int4", "fp16", "0x64640000", "0x43430000"), ("int4", "bf16", "20", "16"),
    ("e2m1", "bf16", "0x01C001C0", "0x00C000C0"), ("e2m1", "bf16", "0x7E807E80", "0x7E007E00"),
    ("e2m1", "bf16", "0x5111", "0x4111"), ("less", "bf16", "0x3F803F80", "0x3C003C00"),
    ("less", "fp16", "fma.rn.f16x2 $0, a, $2", "fma.rn.f16x2 $0, a, $3"), ("rounded", "bf16", "y, x;", "x, y;"),
    ("rounded", "fp16", "0xFFFF0000", "0xFFBF0000"), ("times", "bf16", "$1, $2", "$1, $1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "right", "wrong"), BUGS)
def test_a_wrong_text_is_found(monkeypatch, name, kind, right, wrong):
    text = dequantise.ASSEMBLY[name, kind]
    assert right in text
    monkeypatch.setitem(dequantise.ASSEMBLY, (name, kind), text.replace(right, wrong, 1))
    checks = {
        "int4": lambda: test_int4(kind, 8), "less": lambda: test_int4(kind, 8), "e2m1": lambda: test_e2m1("e2m1"),
        "rounded": lambda: test_nvfp4(kind), "times": test_mxfp4_is_its_twin,
    }  # fmt: skip
    with pytest.raises(AssertionError):
        checks[name]()
