//! The one table of element types: torch's name and code, bytes per element, the stored string, and
//! the name in safetensors.

/// An element type that a file can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DType(&'static DTypeRow);

#[derive(Debug, PartialEq, Eq, Hash)]
struct DTypeRow {
    name: &'static str,
    code: i8,
    size: u8,
    /// The numpy string of plain types; opaque ones are stored as `V<size>` and their name.
    plain: Option<&'static str>,
    /// Its counterpart in safetensors, if there is one.
    safetensors: Option<SafetensorsDType>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SafetensorsDType {
    name: &'static str,
    /// The number of safetensors values in one element here.
    values: u8,
    /// Its sort rank in safetensors, which writes data in descending order of rank.
    rank: u8,
}

impl DTypeRow {
    const fn in_safetensors(self, name: &'static str, rank: u8) -> DTypeRow {
        self.packed(name, 1, rank)
    }

    const fn packed(self, name: &'static str, values: u8, rank: u8) -> DTypeRow {
        DTypeRow { safetensors: Some(SafetensorsDType { name, values, rank }), ..self }
    }
}

const fn plain(name: &'static str, code: i8, size: u8, numpy: &'static str) -> DTypeRow {
    DTypeRow { name, code, size, plain: Some(numpy), safetensors: None }
}

const fn opaque(name: &'static str, code: i8, size: u8) -> DTypeRow {
    DTypeRow { name, code, size, plain: None, safetensors: None }
}

/// `code` is the value of `c10::ScalarType`, which torch keeps stable because it serialises it.
static TABLE: [DTypeRow; 41] = [
    plain("uint8", 0, 1, "|u1").in_safetensors("U8", 4),
    plain("int8", 1, 1, "|i1").in_safetensors("I8", 5),
    plain("int16", 2, 2, "<i2").in_safetensors("I16", 11),
    plain("int32", 3, 4, "<i4").in_safetensors("I32", 15),
    plain("int64", 4, 8, "<i8").in_safetensors("I64", 20),
    plain("float16", 5, 2, "<f2").in_safetensors("F16", 13),
    plain("float32", 6, 4, "<f4").in_safetensors("F32", 17),
    plain("float64", 7, 8, "<f8").in_safetensors("F64", 19),
    opaque("complex32", 8, 4),
    plain("complex64", 9, 8, "<c8").in_safetensors("C64", 18),
    plain("complex128", 10, 16, "<c16"),
    plain("bool", 11, 1, "|b1").in_safetensors("BOOL", 0),
    opaque("bfloat16", 15, 2).in_safetensors("BF16", 14),
    opaque("bits1x8", 18, 1),
    opaque("bits2x4", 19, 1),
    opaque("bits4x2", 20, 1),
    opaque("bits8", 21, 1),
    opaque("bits16", 22, 2),
    opaque("float8_e5m2", 23, 1).in_safetensors("F8_E5M2", 6),
    opaque("float8_e4m3fn", 24, 1).in_safetensors("F8_E4M3", 7),
    opaque("float8_e5m2fnuz", 25, 1).in_safetensors("F8_E5M2FNUZ", 10),
    opaque("float8_e4m3fnuz", 26, 1).in_safetensors("F8_E4M3FNUZ", 9),
    plain("uint16", 27, 2, "<u2").in_safetensors("U16", 12),
    plain("uint32", 28, 4, "<u4").in_safetensors("U32", 16),
    plain("uint64", 29, 8, "<u8").in_safetensors("U64", 21),
    opaque("uint1", 30, 1),
    opaque("uint2", 31, 1),
    opaque("uint3", 32, 1),
    opaque("uint4", 33, 1),
    opaque("uint5", 34, 1),
    opaque("uint6", 35, 1),
    opaque("uint7", 36, 1),
    opaque("int1", 37, 1),
    opaque("int2", 38, 1),
    opaque("int3", 39, 1),
    opaque("int4", 40, 1),
    opaque("int5", 41, 1),
    opaque("int6", 42, 1),
    opaque("int7", 43, 1),
    opaque("float8_e8m0fnu", 44, 1).in_safetensors("F8_E8M0", 8),
    opaque("float4_e2m1fn_x2", 45, 1).packed("F4", 2, 1),
];

/// Types of safetensors that torch lacks: four values in three bytes.
static BEYOND_TORCH: [DTypeRow; 2] = [
    opaque("float6_e2m3fn_x4", -1, 3).packed("F6_E2M3", 4, 2),
    opaque("float6_e3m2fn_x4", -2, 3).packed("F6_E3M2", 4, 3),
];

impl DType {
    /// Every type of torch, in the order of torch's codes.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(DType)
    }

    /// The type with torch's code (`c10::ScalarType`).
    pub fn from_code(code: i8) -> Option<Self> {
        TABLE.iter().find(|row| row.code == code).map(DType)
    }

    /// The type with this name, which is without `torch.`.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(DType)
    }

    /// The type with this name in safetensors, and the number of values there in one element.
    pub fn from_safetensors(name: &str) -> Option<(Self, u64)> {
        TABLE.iter().chain(&BEYOND_TORCH).find_map(|row| {
            let found = row.safetensors.filter(|counterpart| counterpart.name == name)?;
            Some((DType(row), u64::from(found.values)))
        })
    }

    /// Its name in safetensors, the number of values there in one element, and its sort rank:
    /// safetensors writes data in descending order of rank.
    pub fn safetensors(self) -> Option<(&'static str, u64, u8)> {
        self.0.safetensors.map(|found| (found.name, u64::from(found.values), found.rank))
    }

    /// True if torch has this type.
    pub fn is_in_torch(self) -> bool {
        self.0.code >= 0
    }

    /// torch's code; negative for types that torch lacks.
    pub fn code(self) -> i8 {
        self.0.code
    }

    /// torch's name, without `torch.`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Bytes per element.
    pub fn size(self) -> u64 {
        u64::from(self.0.size)
    }

    /// True if it is stored as untyped bytes with torch's name, because numpy has no such type.
    pub fn is_opaque(self) -> bool {
        self.0.plain.is_none()
    }

    /// The string that files store for it.
    pub fn stored(self) -> String {
        match self.0.plain {
            Some(numpy) => numpy.to_owned(),
            None => {
                let order = if self.0.size == 1 { '|' } else { '<' };
                format!("{order}V{}\0torch.{}", self.0.size, self.0.name)
            }
        }
    }

    /// True if a file's string is the usual one of this type. False for its other spellings, and
    /// for opaque types: [`DType::parse`] reads those.
    pub fn is_usual_string(self, stored: &[u8]) -> bool {
        self.0.plain.is_some_and(|plain| plain.as_bytes() == stored)
    }

    /// Parses a file's string; the error says what is wrong with it.
    ///
    /// Plain strings may also be spelled with `=` or without a byte order.
    pub fn parse(stored: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(stored)
            .map_err(|_| format!("dtype is not UTF-8: {}", stored.escape_ascii()))?;
        let unknown = || format!("unknown dtype {text:?}");
        let Some((void, torch)) = text.split_once('\0') else {
            let kind = text.trim_start_matches(['<', '|', '=']);
            let native = text.len() - kind.len() <= 1;
            return TABLE
                .iter()
                .find(|row| {
                    row.plain.is_some_and(|p| p == text || (native && p.get(1..) == Some(kind)))
                })
                .map(DType)
                .ok_or_else(unknown);
        };
        let name = torch.strip_prefix("torch.").ok_or_else(unknown)?;
        let dtype = Self::from_name(name).ok_or_else(unknown)?;
        let size =
            void.trim_start_matches(['<', '|', '=']).strip_prefix('V').ok_or_else(unknown)?;
        if !size.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(unknown());
        }
        if size != dtype.0.size.to_string() {
            return Err(format!(
                "dtype {text:?} stores {size} bytes an element, torch.{name} has {}",
                dtype.0.size
            ));
        }
        Ok(dtype)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "torch.{}", self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_dtype_strings_round_trip() {
        for dtype in DType::all() {
            assert_eq!(DType::parse(dtype.stored().as_bytes()), Ok(dtype));
        }
    }

    #[test]
    fn other_spellings_of_plain_dtypes_are_parsed() {
        for text in ["<f4", "=f4", "f4"] {
            assert_eq!(DType::parse(text.as_bytes()).unwrap().name(), "float32");
        }
        assert_eq!(DType::parse(b"<V2\0torch.bfloat16").unwrap().name(), "bfloat16");
        for text in [">f4", "<f4\0torch.bfloat16", "<V4", "O", "<V2\0torch.float8_e5m2", "<<f4", ""]
        {
            assert!(DType::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        // Control characters are escaped, so that a terminal does not act on them.
        let message = DType::parse(b"<V\x1b[2J\0torch.bfloat16").unwrap_err();
        assert_eq!(message, r#"unknown dtype "<V\u{1b}[2J\0torch.bfloat16""#);
    }
}
