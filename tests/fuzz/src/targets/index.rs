//! Prologue, index, and the index trailer.
use crate::input::Input;
use crate::tensors;
use tensorizer::format::tensors::prologue::{PROLOGUE_LEN, Prologue};
use tensorizer::format::tensors::{index, metadata, trailer};

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let made = input.once_in(2);
    let known = input.once_in(2);
    let file = if made { tensors::file(&mut input).bytes } else { input.rest().to_vec() };
    let Ok(prologue) = Prologue::parse(&file, 0, "fuzzed") else { return };
    assert_eq!(Prologue::parse(&prologue.encode(), 0, "fuzzed").unwrap(), prologue);
    let block = &file[PROLOGUE_LEN..];
    let block = &block[..block.len().min(usize::try_from(prologue.index_len).unwrap_or(0))];
    let len = known.then_some(file.len() as u64);
    let at = PROLOGUE_LEN as u64;
    let Ok(found) = index::parse(block, at, &prologue, len, "fuzzed") else { return };
    assert_eq!(found.entries.len() as u64, prologue.count);
    let mut order: Vec<_> = found.entries.iter().collect();
    order.sort_by_key(|entry| entry.header_offset);
    let mut end = at + prologue.index_len;
    for entry in order {
        assert!(entry.header_offset >= end && entry.data_offset > entry.header_offset);
        assert!(entry.is_meta() || entry.memory_len() == Some(entry.data_len));
        end = entry.end();
        assert!(len.is_none_or(|len| end <= len));
    }
    for (number, entry) in found.entries.iter().enumerate() {
        assert_eq!(found.names.find(entry.name.stored()), Some(number));
    }
    // An index that is encoded again has the same entries.
    let tagged = prologue.versioned_entries;
    let again = index::encode(&found.entries, tagged, prologue.index_len.max(1 << 16));
    let again = index::parse(&again.unwrap(), at, &Prologue { index_len: 0, ..prologue }, len, "");
    assert!(again.is_ok_and(|again| again.entries.len() == found.entries.len()));
    let said = trailer::find(&block[found.len..], at + found.len as u64);
    if let Ok(pairs) = said.metadata {
        let written = metadata::encode(&pairs, "f").unwrap();
        assert_eq!(metadata::find(&written, 0).unwrap(), pairs);
    }
}
