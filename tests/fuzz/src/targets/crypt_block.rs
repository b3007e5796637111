//! Blocks of encryption, as bytes of any kind.
use tensorizer::codec::crypt::{EncryptedPieces, Key};
use tensorizer::format::tensors::crypt_info::{Cipher, CryptInfo, encode};

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let Ok(info) = CryptInfo::parse(bytes, 0) else { return };
    let Some(cipher) = info.cipher else { return };
    if let Cipher { piece_len: Some(piece_len), nonce, macs } = &cipher
        && !macs.is_empty()
    {
        let again = encode(info.key_derivation.as_ref(), *piece_len, nonce, macs);
        let again = CryptInfo::parse(&again[8..], 0).unwrap();
        assert_eq!(again.cipher.as_ref(), Some(&cipher));
        assert_eq!(again.key_derivation, info.key_derivation);
    }
    let key = Key::new(&[7; 32]).unwrap();
    for len in [0u64, 1, 1024, 1025, 5000] {
        let Ok(pieces) = EncryptedPieces::of(&cipher, len) else { continue };
        let mut at = 0;
        while at < len {
            let (number, start, end) = pieces.piece(at);
            assert!(start == at && end > at && end <= len);
            let mut data = vec![0; (end - start) as usize];
            assert!(!pieces.decrypt(number, &mut data, &key), "zeros are no data of this key");
            at = end;
        }
    }
}
