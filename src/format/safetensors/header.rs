//! Parses headers.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{LENGTH_LEN, METADATA};
use crate::error::{Malformed, Result, Shortened};
use crate::fallible::try_with_capacity;

use crate::format::catalog::{Entry, MAX_DIMS, checked_len};
use crate::format::dtype::DType;
use crate::format::json::Scalar;
use crate::format::name::Name;

/// A parsed header.
#[derive(Debug, Default)]
pub struct SafetensorsHeader {
    /// Tensors, in the order of their data.
    pub entries: Vec<Entry>,
    /// Names and values; None if the header has no `__metadata__`.
    pub metadata: Option<Vec<(String, String)>>,
    /// Position after the data, which is also the end of the file.
    pub end: u64,
}

/// Parses a header that lies at `base + 8` of `uri`; `file` is the number of that file.
pub fn parse(json: &[u8], base: u64, file: usize, uri: &str) -> Result<SafetensorsHeader> {
    let at = base.saturating_add(LENGTH_LEN);
    let malformed = |what: String| Malformed::new(at, what).in_file(uri);
    let failed = |what: &str| malformed(format!("the safetensors header: {}", Shortened(what)));
    let text = std::str::from_utf8(json).map_err(|e| failed(&format!("it is not UTF-8: {e}")))?;
    // An upper bound of the number of tensors: each has at least the colon after its name.
    let most = json.iter().filter(|&&byte| byte == b':').count();
    let mut raw = UncheckedHeader {
        tensors: try_with_capacity(most, "a safetensors header")?,
        metadata: None,
    };
    let mut from = serde_json::Deserializer::from_str(text);
    let read = from.deserialize_map(&mut raw).and_then(|()| from.end());
    read.map_err(|e| failed(&e.to_string()))?;
    let data_at = at.saturating_add(json.len() as u64);
    let mut tensors = raw.tensors;
    tensors
        .sort_unstable_by(|(a, one), (b, two)| (one.data_offsets, a).cmp(&(two.data_offsets, b)));
    let mut entries = Vec::with_capacity(tensors.len());
    let mut end = 0;
    for (key, info) in &tensors {
        let name = Name::from_key(key).map_err(malformed)?;
        let fail = |what: String| malformed(format!("tensor `{name}`: {what}"));
        let (dtype, shape) = info.placed(end).map_err(|what| match twice(&tensors) {
            Some(name) => malformed(format!("tensor `{}` comes twice", Shortened(name))),
            None => fail(what),
        })?;
        let (from, to) = info.data_offsets;
        end = to;
        let data_offset = data_at.checked_add(from).filter(|at| i64::try_from(*at).is_ok());
        let data_offset = data_offset.ok_or_else(|| fail(format!("data at byte {from}")))?;
        entries.push(Entry::new(name, dtype, shape, file, data_offset, to - from));
    }
    let end = data_at.saturating_add(end);
    let metadata = raw.metadata.map(|pairs| pairs.into_iter().collect());
    Ok(SafetensorsHeader { entries, metadata, end })
}

/// A name that two tensors have.
fn twice<'t>(tensors: &'t [(Cow<'_, str>, TensorFields<'_>)]) -> Option<&'t str> {
    let mut names = HashSet::new();
    tensors.iter().map(|(name, _)| &**name).find(|name| !names.insert(*name))
}

/// A header before it is validated.
struct UncheckedHeader<'j> {
    /// Allocated beforehand, with room for all tensors.
    tensors: Vec<(Cow<'j, str>, TensorFields<'j>)>,
    metadata: Option<BTreeMap<String, String>>,
}

/// The fields of one tensor.
struct TensorFields<'j> {
    dtype: Cow<'j, str>,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl<'de: 'j, 'j> Deserialize<'de> for TensorFields<'j> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = TensorFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("dtype, shape and data_offsets of a tensor")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<TensorFields<'de>, A::Error> {
                let short = |found| de::Error::invalid_length(found, &FieldsVisitor);
                Ok(TensorFields {
                    dtype: seq.next_element::<BorrowedText<'_>>()?.ok_or_else(|| short(0))?.0,
                    shape: seq.next_element()?.ok_or_else(|| short(1))?,
                    data_offsets: seq.next_element()?.ok_or_else(|| short(2))?,
                })
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<TensorFields<'de>, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(BorrowedText(key)) = map.next_key()? {
                    let twice = match &*key {
                        "dtype" => dtype.replace(map.next_value::<BorrowedText<'_>>()?.0).is_some(),
                        "shape" => shape.replace(map.next_value::<Shape>()?).is_some(),
                        "data_offsets" => offsets.replace(map.next_value()?).is_some(),
                        _ => map.next_value::<Scalar>().map(|_| false)?,
                    };
                    if twice {
                        return Err(de::Error::custom(format!(
                            "duplicate field `{}`",
                            Shortened(&key)
                        )));
                    }
                }
                Ok(TensorFields {
                    dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
                    data_offsets: offsets
                        .ok_or_else(|| de::Error::missing_field("data_offsets"))?,
                })
            }
        }
        // An object, or a list of the fields in this order.
        from.deserialize_struct("tensor", &["dtype", "shape", "data_offsets"], FieldsVisitor)
    }
}

impl TensorFields<'_> {
    /// Returns type and shape, and checks that the data begin at `end` and have the length that
    /// these need.
    fn placed(&self, end: u64) -> Result<(DType, Box<[u64]>), String> {
        let (from, to) = self.data_offsets;
        if from != end || to < from {
            return Err(format!(
                "expected its data from byte {end} of the data on, found {from} to {to}: they \
                 overlap others, or leave a hole"
            ));
        }
        let (dtype, shape) = self.of_torch()?;
        let len = checked_len(dtype, &shape)
            .ok_or_else(|| format!("shape {shape:?} of {dtype} is too large"))?;
        let found = to - from;
        if found != len {
            return Err(format!(
                "expected {len} bytes of data for shape {shape:?} of {dtype}, found {found}"
            ));
        }
        Ok((dtype, shape))
    }

    /// Type and shape in torch, where one element may hold several of the values here.
    fn of_torch(&self) -> Result<(DType, Box<[u64]>), String> {
        let (dtype, values) = DType::from_safetensors(&self.dtype)
            .ok_or_else(|| format!("unknown dtype `{}`", Shortened(&self.dtype)))?;
        let mut shape = self.shape.0.clone();
        if values > 1 {
            let last = shape.last_mut().filter(|last| last.is_multiple_of(values));
            *last.ok_or_else(|| {
                let (name, found) = (&self.dtype, &self.shape.0);
                format!(
                    "{name} needs a last dimension that is a multiple of {values}, found {found:?}"
                )
            })? /= values;
        }
        Ok((dtype, shape.into()))
    }
}

/// Dimensions, at most [`MAX_DIMS`] of them.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        from.deserialize_seq(DimsVisitor)
    }
}

/// Parses all members of a header.
impl<'de: 'j, 'j> Visitor<'de> for &mut UncheckedHeader<'j> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut told = false;
        while let Some(BorrowedText(key)) = map.next_key()? {
            if key != METADATA {
                // Duplicate names are found later, when the names of all tensors are put together.
                self.tensors.push((key, map.next_value()?));
                continue;
            }
            if std::mem::replace(&mut told, true) {
                return Err(de::Error::duplicate_field(METADATA));
            }
            self.metadata = map.next_value::<Option<StringMap>>()?.map(|s| s.0);
        }
        Ok(())
    }
}

/// A string, borrowed from the input if it is written without escapes.
#[derive(Deserialize)]
struct BorrowedText<'j>(#[serde(borrow)] Cow<'j, str>);

/// Names and values; duplicate names are refused.
pub(in crate::format) struct StringMap(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct StringMapVisitor;
        impl<'de> Visitor<'de> for StringMapVisitor {
            type Value = StringMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringMap, A::Error> {
                let mut pairs = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if pairs.contains_key(&name) {
                        let what = format!("`{}` comes twice", Shortened(&name));
                        return Err(de::Error::custom(what));
                    }
                    pairs.insert(name, value);
                }
                Ok(StringMap(pairs))
            }
        }
        from.deserialize_map(StringMapVisitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    /// Types, with the bits of one value.
    const SOME: [(&str, u64); 6] =
        [("U8", 8), ("F32", 32), ("C64", 64), ("F4", 4), ("F6_E2M3", 6), ("BOOL", 8)];

    #[test]
    fn unused_fields_must_be_valid_json() {
        let with = |field: &[u8]| {
            let mut json = br#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":"#.to_vec();
            json.extend(field);
            json.extend(b"}}");
            parse(&json, 0, 0, "f").map(|_| ())
        };
        with(br#"{"a":[null,true,1.5e3,"b"]}"#).unwrap();
        let deep = [vec![b'['; 5_000], vec![b']'; 5_000]].concat();
        for field in [&b"\"\xff\""[..], br#""\ud800""#, b"1e999", &deep] {
            with(field).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn data_offsets_must_be_contiguous(
            tensors in proptest::collection::btree_map(
                ".{0,6}",
                (0..SOME.len(), proptest::collection::vec(0u64..5, 0..4)),
                0..8,
            ),
            change in proptest::option::of((0usize..8, 0usize..2, 0u64..40)),
        ) {
            let mut header = Map::new();
            let mut end = 0;
            for (name, (dtype, dims)) in tensors.iter().filter(|(name, _)| *name != METADATA) {
                let (dtype, bits) = SOME[*dtype];
                // Rows that consist of whole elements of torch.
                let shape: Vec<u64> = dims.iter().copied().chain([8]).collect();
                let len = shape.iter().product::<u64>() * bits / 8;
                let info =
                    json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + len] });
                header.insert(name.clone(), info);
                end += len;
            }
            let mut changed = false;
            if let Some((number, which, to)) = change
                && let Some(info) = header.values_mut().nth(number)
            {
                changed = info["data_offsets"][which] != to;
                info["data_offsets"][which] = to.into();
            }
            let text = Value::Object(header.clone()).to_string();
            let data_at = 100 + LENGTH_LEN + text.len() as u64;
            let found = parse(text.as_bytes(), 100, 3, "f");
            prop_assert_eq!(found.is_err(), changed, "{}", text);
            if let Ok(header) = found {
                prop_assert_eq!(header.end, data_at + end);
                prop_assert_eq!(header.entries.len(), tensors.len());
                let ends = header.entries.iter().map(Entry::end);
                let begins = header.entries.iter().map(|entry| entry.data_offset);
                prop_assert!([data_at].into_iter().chain(ends).eq(begins.chain([data_at + end])));
                prop_assert!(header.entries.iter().all(|e| e.memory_len() == Some(e.data_len)));
                prop_assert!(header.entries.iter().all(|e| e.file == 3));
            }
        }
    }
}
