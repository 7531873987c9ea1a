use proptest::prelude::*;

use super::*;

fn geometry() -> PortGeometry {
    PortGeometry::new(16, 16, 1 << 16).unwrap()
}

fn token() -> SendToken {
    SendToken {
        generation: 7,
        opcode: Opcode::Send,
        priority: 1,
        flags: 0,
        node: 2,
        port: 9,
        len: 100,
        arena_offset: 4096,
        tag: 42,
        timeout_us: 5,
    }
}

fn claim(token: &SendToken) -> Untrusted<SEND_SLOT_WORDS> {
    let mut words = [0; SEND_SLOT_WORDS];
    words[..6].copy_from_slice(&token.encode());
    Untrusted::claim(words)
}

fn check(token: &SendToken) -> Result<SendToken, BadToken> {
    claim(token).check(
        TokenRef {
            slot: 0,
            generation: 7,
        },
        &geometry(),
    )
}

#[test]
fn a_good_token_is_itself() {
    assert_eq!(check(&token()), Ok(token()));
}

// Payloads of every length that a slot holds. Expect: each byte in its place, zeros to the end of its last word, nothing beyond that, header as without.
#[test]
fn an_inline_payload_is_in_its_slot_byte_for_byte() {
    let bytes: Vec<u8> = (1..=INLINE_BYTES as u8).collect();
    for len in 0..=INLINE_BYTES {
        let slot = [const { AtomicU64::new(u64::MAX) }; SEND_SLOT_WORDS];
        token().store(&slot, &bytes[..len]);
        let words: Vec<u64> = slot.iter().map(|w| w.load(Ordering::Relaxed)).collect();
        let (header, payload) = words.split_at(SEND_HEADER_WORDS);
        assert_eq!(header, token().encode());
        let written: Vec<u8> = payload.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let end = len.next_multiple_of(8);
        assert_eq!(written[..len], bytes[..len]);
        assert!(written[len..end].iter().all(|byte| *byte == 0));
        assert!(written[end..].iter().all(|byte| *byte == 0xff), "{len}");
    }
}

#[test]
fn each_bad_field_is_named() {
    assert_eq!(
        check(&SendToken {
            generation: 8,
            ..token()
        }),
        Err(BadToken::Generation)
    );
    assert_eq!(
        check(&SendToken {
            generation: 0,
            ..token()
        }),
        Err(BadToken::Generation)
    );
    assert_eq!(
        check(&SendToken {
            priority: 2,
            ..token()
        }),
        Err(BadToken::Priority)
    );
    assert_eq!(
        check(&SendToken { node: 0, ..token() }),
        Err(BadToken::Destination)
    );
    assert_eq!(
        check(&SendToken {
            node: u16::MAX,
            ..token()
        }),
        Err(BadToken::Destination)
    );
    assert_eq!(
        check(&SendToken {
            port: 256,
            ..token()
        }),
        Err(BadToken::Destination)
    );
    assert_eq!(
        check(&SendToken {
            arena_offset: (1 << 16) - 99,
            ..token()
        }),
        Err(BadToken::Range)
    );
    assert_eq!(
        check(&SendToken {
            arena_offset: u64::MAX,
            ..token()
        }),
        Err(BadToken::Range)
    );
    assert_eq!(
        check(&SendToken {
            len: u32::MAX,
            ..token()
        }),
        Err(BadToken::Range)
    );
    assert_eq!(
        check(&SendToken {
            flags: FLAG_INLINE,
            len: 81,
            ..token()
        }),
        Err(BadToken::Range)
    );
    let both = FLAG_ACK_IMMEDIATE | FLAG_ACK_LAZY;
    let contradictions = [
        (Opcode::Send, both),
        (Opcode::Send, 0xff),
        (Opcode::Answer, 0),
        (Opcode::Answer, 4),
        (Opcode::Answer, 0xff),
    ];
    for (opcode, flags) in contradictions {
        let token = SendToken {
            opcode,
            flags,
            ..token()
        };
        assert_eq!(check(&token), Err(BadToken::Flags), "{opcode:?} {flags}");
    }
    let mut words = [0; SEND_SLOT_WORDS];
    words[0] = 7 << 32 | 99;
    let expected = TokenRef {
        slot: 0,
        generation: 7,
    };
    assert_eq!(
        Untrusted::claim(words).check(expected, &geometry()),
        Err(BadToken::Opcode)
    );
    // A hole punched into the slot. Expect: generation 0, refused.
    assert_eq!(
        Untrusted::claim([0; SEND_SLOT_WORDS]).check(expected, &geometry()),
        Err(BadToken::Generation)
    );
}

// Every verdict, with every field at its edges. Expect: checked and read back as it was; no other opcode carries one.
#[test]
fn an_answer_survives_its_slot() {
    for verdict in [Verdict::Accept, Verdict::Shorten, Verdict::Refuse] {
        let answer = AnswerToken {
            from: (u16::MAX - 1, 255),
            priority: 1,
            incarnation: u32::MAX,
            epoch: u32::MAX,
            number: u32::MAX - 1,
            verdict,
            len: u32::MAX,
        };
        let token = check(&answer.token(7)).unwrap();
        assert_eq!(AnswerToken::of(&token), Some(answer));
        let opcode = Opcode::Send;
        assert_eq!(AnswerToken::of(&SendToken { opcode, ..token }), None);
    }
    for ack in [FLAG_ACK_IMMEDIATE, FLAG_ACK_LAZY] {
        let flags = ack | FLAG_INLINE;
        let token = SendToken {
            flags,
            len: 80,
            ..token()
        };
        assert_eq!(check(&token), Ok(token));
    }
}

proptest! {
    // Any words at all. Expect: no panic, and what is believed lies inside the arena or the slot.
    #[test]
    fn what_is_believed_is_inside(words in any::<[u64; SEND_SLOT_WORDS]>(), slot in any::<u32>()) {
        let expected = TokenRef { slot, generation: (words[0] >> 32) as u32 };
        if let Ok(token) = Untrusted::claim(words).check(expected, &geometry()) {
            prop_assert!(token.priority <= 1);
            if token.opcode == Opcode::Send {
                let inline = token.flags & FLAG_INLINE != 0;
                let inside = if inline { token.len as usize <= INLINE_BYTES } else { geometry().arena_holds(token.arena_offset, token.len) };
                prop_assert!(inside);
            }
        }
    }

    #[test]
    fn what_is_provided_is_inside(words in any::<[u64; RECEIVE_SLOT_WORDS]>()) {
        let expected = TokenRef { slot: 0, generation: (words[0] >> 32) as u32 };
        if let Ok(token) = Untrusted::claim(words).check(expected, &geometry()) {
            prop_assert!(geometry().arena_holds(token.arena_offset, token.len));
            prop_assert_eq!(token.encode()[1], words[1]);
        }
    }

    #[test]
    fn a_reference_survives_its_ring_word(slot in any::<u32>(), generation in any::<u32>()) {
        let reference = TokenRef { slot, generation };
        prop_assert_eq!(TokenRef::decode(reference.encode()), reference);
    }
}
