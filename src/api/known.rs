//! What opening the files of a catalog has learnt of them, for others that open them too.

use super::file::TensorFile;
use super::part::read_growing;
use crate::cancel::Cancel;
use crate::error::Result;
use crate::format::tensors::prologue::PROLOGUE_LEN;
use crate::io::source::KnownHead;

impl TensorFile {
    /// What servers have said of its files, each with all bytes before its tensors: the index of shards
    /// first, if there is one, then the files in their order. Nothing of local files, of servers without
    /// ranges and of closed files.
    #[doc(hidden)]
    pub fn heads(&self, cancel: &dyn Cancel) -> Result<Vec<KnownHead>> {
        let heads = self.known_heads();
        let mut found: Vec<KnownHead> = heads.of_index.iter().cloned().collect();
        for (source, &end) in self.sources().iter().zip(&heads.ends) {
            let Some(known) = source.known_head() else { continue };
            // As much as the format is told by.
            let end = end.max(PROLOGUE_LEN as u64).min(known.len);
            let mut first = Vec::new();
            read_growing(&**source, 0, end, &mut first, "the index", cancel)?;
            found.push(KnownHead { first: first.into(), ..known });
        }
        Ok(found)
    }
}

#[cfg(test)]
#[cfg(feature = "http")]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::part::Opening;
    use super::*;
    use crate::cancel::Never;
    use crate::error::Error;
    use crate::io::source::KnownHeads;

    /// Nobody listens there.
    const ADDRESS: &str = "http://user:word@127.0.0.1:1/f?token=hidden";

    fn head() -> KnownHead {
        let json = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
        let json = format!("{json:80}");
        let first: Vec<u8> = 80u64.to_le_bytes().into_iter().chain(json.bytes()).collect();
        KnownHead {
            uri: "http://127.0.0.1:1/f?...".to_owned(),
            len: 90,
            tag: Some("\"tag\"".to_owned()),
            modified: None,
            headers: vec![("name".to_owned(), "value".to_owned())],
            first: first.into(),
        }
    }

    fn open(head: KnownHead) -> Result<TensorFile> {
        let known = KnownHeads::from_iter([head]);
        Opening { cancel: &Never, storages: false }.uri(ADDRESS, &known)
    }

    #[test]
    fn a_file_is_opened_without_its_server() {
        let file = open(head()).unwrap();
        assert_eq!(file.entry(0).unwrap().data_offset, 88);
        assert_eq!(file.source(0).unwrap().headers(), head().headers);
        assert_eq!(file.heads(&Never).unwrap(), [head()]);
    }

    #[test]
    fn a_head_is_no_longer_than_its_file() {
        let error = open(KnownHead { len: 87, ..head() }).err().unwrap();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        assert!(
            error.to_string().contains("at most the 87 bytes of the file, found 88"),
            "{error}"
        );
        assert!(matches!(open(KnownHead { len: 89, ..head() }), Err(Error::Truncated { .. })));
    }
}
