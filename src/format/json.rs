//! Helpers for parsing JSON, shared by the formats of other projects.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A string, number or boolean as text; None for any other value, which must still be well-formed,
/// and not nested too deeply.
pub struct Scalar(pub Option<String>);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

macro_rules! scalars {
    ($($visit:ident: $value:ty),+) => {
        $(fn $visit<E>(self, value: $value) -> Result<Scalar, E> {
            Ok(Scalar(Some(value.to_string())))
        })+
    };
}

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    scalars!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        while seq.next_element::<Scalar>()?.is_some() {}
        Ok(Scalar(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        while map.next_entry::<Scalar, Scalar>()?.is_some() {}
        Ok(Scalar(None))
    }
}
