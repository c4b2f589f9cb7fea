"""Values for probes: of each type those at its edges and ordinary ones. Everything comes from a seed."""
import random
import struct

LANES = 64


def f32(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def f16(x):
    return struct.unpack("<H", struct.pack("<e", x))[0]


def f64(x):
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def signed(values, bits):
    return values + [value | 1 << (bits - 1) for value in values]


# Zero, subnormals, the smallest normal, ties of fp8 and integers, limits of fp8, f16, integers, infinity, NaN.
F32_EDGES = signed([0, 1, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x33800000, 0x3A000000, 0x3A800000,
                    0x3AC00000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x40200000, 0x4B000000,
                    0x4B000001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FA00000, 0x7FC00000, 0x7FFFFFFF] +
                   [f32(x) for x in (2.0 ** -11, 2.0 ** -10, 1.5 * 2.0 ** -10, 2.5 * 2.0 ** -10, 2.0 ** -7, 15.5, 17.0, 19.0,
                                     239.9, 240.0, 244.0, 247.99, 248.0, 256.0, 448.0, 57344.0, 61440.0, 61439.0,
                                     65504.0, 65519.0, 65520.0, 2.0 ** -24, 2.0 ** -25, 2.0 ** 31, 2.0 ** 32, 126.5,
                                     149.5, 3.14159265)], 32)
F16_EDGES = signed([0, 1, 0x0200, 0x03FF, 0x0400, 0x0401, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0x3E00, 0x4100, 0x7BFF, 0x7C00,
                    0x7C01, 0x7D00, 0x7E00, 0x7FFF], 16)
F64_EDGES = signed([0, 1, 1 << 51, (1 << 52) - 1, 1 << 52, (1 << 52) + 1, f64(0.5), f64(1.0), f64(1.0) + 1, f64(1.5),
                    f64(2.5), f64(2.0 ** 31), f64(2.0 ** 32 - 1), f64(2.0 ** 52 + 1), f64(2.0 ** -149), f64(2.0 ** 128),
                    0x7FEFFFFFFFFFFFFF, 0x7FF << 52, (0x7FF << 52) + 1, 0x7FF8 << 48, (1 << 63) - 1], 64)
INT_EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF,
             0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFF80, 0xFFFF8000, 0xFFFFFFFE, 0xFFFFFFFF]

# Each makes 64 bits: one value of 64, or two of 32, or four of 16.
KINDS = {
    "bits": lambda r: r.getrandbits(64),
    "f32": lambda r: pair(lambda: f32(r.gauss(0, 1) * 2.0 ** r.randint(-6, 6))),
    "f32 near 1": lambda r: pair(lambda: f32(r.uniform(-4, 4))),
    "f32 edges": lambda r: pair(lambda: r.choice(F32_EDGES)),
    "f16": lambda r: quad(lambda: f16(r.gauss(0, 1) * 2.0 ** r.randint(-4, 4))),
    "f16 edges": lambda r: quad(lambda: r.choice(F16_EDGES)),
    "f64": lambda r: f64(r.gauss(0, 1) * 2.0 ** r.randint(-20, 20)),
    "f64 edges": lambda r: r.choice(F64_EDGES),
    "integers": lambda r: pair(lambda: r.randint(-1000, 1000) & 0xFFFFFFFF),
    "integer edges": lambda r: pair(lambda: r.choice(INT_EDGES)),
}


def pair(make):
    return make() | make() << 32


def quad(make):
    return make() | make() << 16 | make() << 32 | make() << 48


def vector_rows(count, seed=1):
    """`count` rows of four 64-bit values a lane, [row][8 words][lane], and their kinds."""
    r, kinds, words = random.Random(seed), list(KINDS), []
    names = [kinds[i % len(kinds)] for i in range(count)]
    for name in names:
        lanes = [[KINDS[name](r) for _ in range(4)] for _ in range(LANES)]
        for value in range(4):
            for shift in 0, 32:
                words += [lanes[lane][value] >> shift & 0xFFFFFFFF for lane in range(LANES)]
    return struct.pack(f"<{len(words)}I", *words), names


def data_rows(count, seed=2):
    """As vector_rows, but the first value is an offset: each lane has 16 bytes of its own below 1024."""
    r = random.Random(seed)
    rows, names = vector_rows(count, seed)
    words = list(struct.unpack(f"<{len(rows) // 4}I", rows))
    orders = [list(range(LANES)), list(reversed(range(LANES))), r.sample(range(LANES), LANES)]
    for row in range(count):
        words[row * 512:row * 512 + LANES] = [16 * lane for lane in orders[row % len(orders)]]
    return struct.pack(f"<{len(words)}I", *words), names


def scalar_rows(count, seed=3):
    """Eight words a row: three sources and a mask of two each."""
    r, kinds, words = random.Random(seed), list(KINDS), []
    for i in range(count):
        for value in range(4):
            # Masks and sources of masks are random bits in every other row.
            bits = KINDS[kinds[i // 2 % len(kinds)]](r) if i % 2 and value < 2 else r.getrandbits(64)
            words += [bits & 0xFFFFFFFF, bits >> 32]
    return struct.pack(f"<{len(words)}I", *words)


# ---- matrices: A and B of 16 bytes a lane each, C of 32 words ----------------------------------------------------------

def fp8_code(r):
    return r.randint(0x20, 0x58) | r.choice((0, 0x80))


def bf16(x):
    return f32(x) >> 16


MATRIX_KINDS = {
    "bits": (lambda r: r.getrandbits(32), lambda r: r.getrandbits(32)),
    "fp8": (lambda r: sum(fp8_code(r) << 8 * i for i in range(4)), lambda r: f32(r.gauss(0, 8))),
    "fp8 edges": (lambda r: sum(r.choice((0, 1, 7, 8, 0x7E, 0x7F, 0x81, 0x87, 0xFE, 0xFF)) << 8 * i for i in range(4)),
                  lambda r: r.choice(F32_EDGES[:19] + F32_EDGES[19:] if r.random() < 0.1 else [0, f32(1e4), f32(-1e-4)])),
    "f16": (lambda r: f16(r.gauss(0, 1)) | f16(r.gauss(0, 1)) << 16, lambda r: f32(r.gauss(0, 4))),
    "f16 edges": (lambda r: r.choice(F16_EDGES[:13]) | r.choice(F16_EDGES[18:31]) << 16,
                  lambda r: r.choice([0, f32(65504.0), f32(1e-8), f32(-3e8)])),
    "bf16": (lambda r: bf16(r.gauss(0, 1)) | bf16(r.gauss(0, 1)) << 16, lambda r: f32(r.gauss(0, 4))),
    "bf16 large": (lambda r: bf16(r.gauss(0, 1) * 2.0 ** r.randint(-70, 63)) | bf16(r.gauss(0, 1)) << 16,
                   lambda r: f32(r.gauss(0, 1) * 2.0 ** r.randint(-60, 60))),
    "f32": (lambda r: f32(r.gauss(0, 1)), lambda r: f32(r.gauss(0, 1))),
    "f64": (lambda r: 0, lambda r: 0),  # by pairs, below
    "integers": (lambda r: r.getrandbits(32), lambda r: r.randint(-1000, 1000) & 0xFFFFFFFF),
    "infinities": (lambda r: r.choice((0x7C003C00, 0xFC00BC00, 0x7F803F80, 0xFF80BF80, 0x3C003C00)),
                   lambda r: r.choice((0, 0x7F800000, 0xFF800000, f32(1.0)))),
}


def matrix_rows(count, seed=4):
    """[row][4 words of A, 4 of B, 32 of C][lane], and their kinds."""
    r, kinds, words = random.Random(seed), list(MATRIX_KINDS), []
    names = [kinds[i % len(kinds)] for i in range(count)]
    for name in names:
        operand, addend = MATRIX_KINDS[name]
        if name == "f64":
            for _ in range(20):
                pairs = [f64(r.gauss(0, 1)) for _ in range(LANES)]
                words += [value & 0xFFFFFFFF for value in pairs] + [value >> 32 for value in pairs]
            continue
        words += [operand(r) for _ in range(8 * LANES)]
        words += [addend(r) for _ in range(32 * LANES)]
    return struct.pack(f"<{len(words)}I", *words), names
