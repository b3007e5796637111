//! Tests that no division exceeds its limit, and that the minimum that an error states is
//! sufficient.

use proptest::prelude::*;

use super::*;

fn of(bytes: u64) -> MemoryLimit {
    MemoryLimit::of(Some(bytes))
}

/// The minimum memory that an error states.
fn named(error: &Error) -> u64 {
    let text = error.to_string();
    let (_, after) = text.split_once("at least ").unwrap();
    after.split(' ').next().unwrap().parse().unwrap()
}

proptest! {
    #[test]
    fn load_shares_stay_within_the_limit(
        bytes in 0u64..1 << 36,
        readers in 1usize..300,
        reader in 0u64..40 << 20,
        gather_bytes in prop_oneof![Just(0u64), 1u64..8 << 20],
        staging in prop_oneof![Just(None), ((20u32..27), 1u64..5, 1u64..500).prop_map(|(len, min_buffers, most)| Some((1u64 << len, min_buffers, most.max(min_buffers))))],
    ) {
        let needs = LoadNeeds { readers, reader_bytes: reader, gather_bytes, staging };
        match of(bytes).load(&needs) {
            Ok(shares) => {
                prop_assert!((1..=readers).contains(&shares.readers));
                prop_assert!(shares.overhead >= MIN_OVERHEAD && shares.gather_bytes >= gather_bytes);
                let (buffer, min_buffers, most) = staging.unwrap_or((0, 0, 0));
                prop_assert!((min_buffers..=most).contains(&shares.staging));
                let each = reader + shares.overhead + shares.gather_bytes;
                let all = each * shares.readers as u64 + shares.staging * buffer;
                prop_assert!(all <= bytes, "{all} of {bytes}: {shares:?}");
            }
            Err(error) => {
                let minimum = named(&error);
                prop_assert!(minimum > bytes);
                prop_assert!(of(minimum).load(&needs).is_ok());
                prop_assert!(of(minimum - 1).load(&needs).is_err());
            }
        }
    }

    #[test]
    fn save_shares_stay_within_the_limit(
        bytes in 0u64..1 << 36,
        threads in 1usize..300,
        thread in 0u64..40 << 20,
        copies in 0u64..3,
        hashes in any::<bool>(),
        retained in 0u64..16 << 20,
        part in prop_oneof![Just(0u64), 5u64 << 20..100 << 20],
        staging in prop_oneof![Just(None), ((20u32..27), 1u64..500).prop_map(|(len, most)| Some((1u64 << len, most)))],
    ) {
        let needs = SaveNeeds { threads, thread_bytes: thread, copies, hashes, retained, part, staging };
        match of(bytes).save(&needs) {
            Ok(shares) => {
                prop_assert!((1..=threads).contains(&shares.threads));
                prop_assert!(part == 0 || shares.parts >= 2 * shares.threads);
                let (buffer, most) = staging.unwrap_or((0, 0));
                prop_assert!(shares.staging <= most);
                prop_assert!(staging.is_none() || shares.staging > 0);
                let each = thread + copies * MAX_COPY;
                let all = each * shares.threads as u64
                    + shares.waiting.unwrap_or(0)
                    + retained
                    + shares.parts as u64 * part
                    + shares.staging * buffer;
                prop_assert!(all <= bytes, "{all} of {bytes}: {shares:?}");
            }
            Err(error) => {
                let minimum = named(&error);
                prop_assert!(minimum > bytes);
                prop_assert!(of(minimum).save(&needs).is_ok());
            }
        }
    }

    #[test]
    fn shares_of_tensors_stay_within_the_limit(
        bytes in 0u64..1 << 36,
        wanted in 0u64..1 << 32,
        largest in 0u64..1 << 30,
        reader in 1u64 << 20..20 << 20,
    ) {
        let limit = of(bytes);
        match limit.tensors(wanted, largest, reader) {
            Ok((tensors, rest)) => {
                prop_assert!(tensors >= largest && rest.bytes.unwrap() >= reader);
                prop_assert_eq!(tensors + rest.bytes.unwrap(), bytes);
            }
            Err(error) => prop_assert!(of(named(&error)).tensors(wanted, largest, reader).is_ok()),
        }
    }
}

#[test]
fn no_limit_leaves_all_shares_unlimited() {
    let none = MemoryLimit::default();
    let needs =
        LoadNeeds { readers: 32, reader_bytes: 1, gather_bytes: 1, staging: Some((1, 2, 64)) };
    let shares = none.load(&needs).unwrap();
    assert_eq!((shares.readers, shares.staging, shares.overhead), (32, 64, u64::MAX));
    assert_eq!(none.window(16 << 20), 16 << 20);
    assert_eq!(none.tensors(1 << 30, 1 << 40, 1).unwrap(), (1 << 30, none));
}

#[test]
fn error_states_the_original_limit() {
    let error = of(3 << 20).reserving(1 << 20).held(1, 5 << 20).unwrap_err().to_string();
    assert!(error.contains("limit of 3145728 bytes") && error.contains("least 6291456"));
}
