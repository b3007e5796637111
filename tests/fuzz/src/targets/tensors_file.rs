//! Whole `.tensors` files with a few wrong fields: opened, loaded, verified, decrypted, cut.
use std::sync::Arc;

use crate::input::Input;
use crate::tensors::{KEY, check_hashes, file};
use crate::{check_slices, load_all, open};
use tensorizer::crypt::{DecryptionOptions, Key, Secret};
use tensorizer::format::catalog::Format;
use tensorizer::{Never, Tensor, Verify};

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let whole = input.once_in(4);
    let made = (!whole).then(|| file(&mut input));
    let bytes = made.as_ref().map_or_else(|| input.rest().to_vec(), |made| made.bytes.clone());
    let Ok(mut opened) = open(&bytes) else { return };
    if opened.format() != Format::Tensors {
        return;
    }
    let encrypted = opened.is_encrypted();
    if encrypted {
        assert!(load_all(&opened, Verify::Nothing).is_none_or(|loaded| loaded.is_err()));
        let key = Key::new(&KEY).unwrap();
        let options = Arc::new(DecryptionOptions::new(Secret::Key(key)));
        let Ok(decrypted) = opened.decrypt(options, &Never) else { return };
        opened = decrypted;
    }
    let Some(loaded) = load_all(&opened, Verify::Nothing) else { return };
    let verified = load_all(&opened, Verify::All).unwrap();
    let Ok(loaded) = loaded else {
        assert!(verified.is_err());
        return;
    };
    let same = |others: &[Tensor]| {
        loaded.iter().zip(others).all(|(one, other)| one.bytes() == other.bytes())
    };
    for tensor in &loaded {
        let entry = tensor.entry();
        if entry.is_meta() {
            assert!(tensor.bytes().iter().all(|&byte| byte == 0));
        } else if !encrypted {
            let range = entry.data_offset as usize..entry.end() as usize;
            assert_eq!(tensor.bytes(), &bytes[range]);
        }
    }
    if let Ok(verified) = verified {
        assert!(same(&verified));
        for tensor in &verified {
            let (entry, meta) = (tensor.entry(), tensor.entry().is_meta());
            let (from, to) = (entry.header_offset as usize, entry.data_offset as usize);
            let data = if meta { &[][..] } else { tensor.bytes() };
            check_hashes(&bytes, from, to, encrypted, data);
        }
    }
    if let Some(made) = made.filter(|made| made.sound) {
        assert!(
            made.tensors
                .iter()
                .zip(&loaded)
                .all(|(made, tensor)| { tensor.entry().is_meta() || made.data == tensor.bytes() })
        );
    }
    check_slices(&opened, &loaded);
}
