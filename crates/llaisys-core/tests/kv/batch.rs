//! `Batch::new`: the contents of a valid batch, and every error by name.

use llaisys_core::batch::{Batch, BatchArrays, BatchError, BatchLimits, output};
use llaisys_core::error::Rejected;

const LIMITS: BatchLimits = BatchLimits { vocab_size: 100, max_positions: 16, n_seq_max: 4, n_streams: 2 };

/// Two rows: the first of one sequence, the second of two.
const ARRAYS: BatchArrays<'static> = BatchArrays {
    tokens: &[7, 99],
    positions: &[0, 15],
    n_seq_id: &[1, 2],
    seq_ids: &[3, 0, 0x1_0001],
    stream: &[],
    wants_output: &[output::NONE, output::LOGITS | output::HIDDEN],
};

fn rejected(arrays: BatchArrays<'_>) -> Rejected {
    Batch::new(arrays, LIMITS).expect_err("an invalid batch")
}

fn batch_error(arrays: BatchArrays<'_>) -> BatchError {
    match rejected(arrays) {
        Rejected::Batch(error) => error,
        other => panic!("expected an error of a row, got {other}"),
    }
}

/// The name and numbers of a length error.
fn length_error(arrays: BatchArrays<'_>) -> (&'static str, usize, usize) {
    match rejected(arrays) {
        Rejected::Length { what, got, want } => (what, got, want),
        other => panic!("expected a length error, got {other}"),
    }
}

#[test]
fn valid_batch_keeps_the_rows_in_order() {
    let batch = Batch::new(ARRAYS, LIMITS).unwrap();
    assert_eq!((batch.n_rows(), &batch.tokens[..], &batch.positions[..]), (2, &[7, 99][..], &[0, 15][..]));
    assert_eq!(batch.seq_start, [0, 1, 3]);
    let slots = |row| batch.row_seqs(row).iter().map(|id| id.slot()).collect::<Vec<_>>();
    assert_eq!((slots(0), slots(1)), (vec![3], vec![0, 1]));
    assert_eq!(batch.row_seqs(1)[1].generation(), 1);
    assert!(batch.stream.is_empty(), "streams are optional");
    assert_eq!(batch.wants_output, [0, 3]);
}

#[test]
fn streams_are_kept_when_given() {
    let batch = Batch::new(BatchArrays { stream: &[1, 0], ..ARRAYS }, LIMITS).unwrap();
    assert_eq!(batch.stream, [1, 0]);
}

#[test]
fn arrays_of_unequal_length_are_rejected() {
    assert_eq!(length_error(BatchArrays { positions: &[0], ..ARRAYS }), ("positions", 1, 2));
    assert_eq!(length_error(BatchArrays { n_seq_id: &[1, 1, 1], ..ARRAYS }), ("n_seq_id", 3, 2));
    assert_eq!(length_error(BatchArrays { wants_output: &[], ..ARRAYS }), ("wants_output", 0, 2));
    assert_eq!(length_error(BatchArrays { stream: &[0], ..ARRAYS }), ("stream", 1, 2));
    assert_eq!(length_error(BatchArrays { seq_ids: &[3, 0, 1, 2], ..ARRAYS }), ("seq_ids", 4, 3));
    assert_eq!(length_error(BatchArrays { seq_ids: &[3, 0], ..ARRAYS }), ("seq_ids", 2, 3));
    assert_eq!(length_error(BatchArrays { seq_ids: &[], ..ARRAYS }), ("seq_ids", 0, 1));
}

#[test]
fn empty_batch_is_rejected() {
    assert_eq!(batch_error(BatchArrays::default()), BatchError::Empty);
}

#[test]
fn token_outside_the_vocabulary_is_rejected() {
    for token in [-1, 100, i32::MIN, i32::MAX] {
        let error = batch_error(BatchArrays { tokens: &[0, token], ..ARRAYS });
        assert_eq!(error, BatchError::Token { row: 1, token, vocab_size: 100 });
    }
}

#[test]
fn position_out_of_bounds_is_rejected() {
    for position in [-1, 16, i32::MIN, i32::MAX] {
        let error = batch_error(BatchArrays { positions: &[0, position], ..ARRAYS });
        assert_eq!(error, BatchError::Position { row: 1, position, max: 15 });
    }
}

#[test]
fn wrong_sequence_count_is_rejected() {
    for n_seq_id in [0, -1, 5, i32::MAX] {
        let error = batch_error(BatchArrays { n_seq_id: &[1, n_seq_id], ..ARRAYS });
        assert_eq!(error, BatchError::SequenceCount { row: 1, n_seq_id, max: 4 });
    }
}

#[test]
fn repeated_sequence_in_a_row_is_rejected() {
    let error = batch_error(BatchArrays { seq_ids: &[3, 2, 2], ..ARRAYS });
    assert_eq!(error, BatchError::RepeatedSequence { row: 1, slot: 2 });
}

#[test]
fn same_sequence_in_two_rows_is_accepted() {
    assert!(Batch::new(BatchArrays { seq_ids: &[2, 1, 2], ..ARRAYS }, LIMITS).is_ok());
}

#[test]
fn unknown_stream_is_rejected() {
    let error = batch_error(BatchArrays { stream: &[1, 2], ..ARRAYS });
    assert_eq!(error, BatchError::Stream { row: 1, stream: 2, n_streams: 2 });
}

#[test]
fn unknown_output_flags_are_rejected() {
    for flags in [8, 0x80, 0xff] {
        let error = batch_error(BatchArrays { wants_output: &[0, flags], ..ARRAYS });
        assert_eq!(error, BatchError::OutputFlags { row: 1, flags });
    }
}

#[test]
fn draft_must_follow_a_row_with_logits_of_the_same_sequence() {
    use output::{DRAFT, LOGITS};
    let arrays = BatchArrays {
        tokens: &[0, 5, 6],
        positions: &[3, 4, 5],
        n_seq_id: &[1, 1, 1],
        seq_ids: &[2, 2, 2],
        wants_output: &[LOGITS, LOGITS | DRAFT, LOGITS | DRAFT],
        ..BatchArrays::default()
    };
    assert!(Batch::new(arrays, LIMITS).is_ok());
    let wrong = [
        (0, BatchArrays { wants_output: &[LOGITS | DRAFT, LOGITS | DRAFT, LOGITS | DRAFT], ..arrays }),
        (1, BatchArrays { wants_output: &[LOGITS, DRAFT, LOGITS | DRAFT], ..arrays }),
        (1, BatchArrays { wants_output: &[0, LOGITS | DRAFT, LOGITS | DRAFT], ..arrays }),
        (1, BatchArrays { positions: &[2, 4, 5], ..arrays }),
        (1, BatchArrays { seq_ids: &[1, 2, 2], ..arrays }),
        (2, BatchArrays { seq_ids: &[2, 2, 1], ..arrays }),
        (2, BatchArrays { n_seq_id: &[1, 1, 2], seq_ids: &[2, 2, 2, 1], ..arrays }),
        (
            2,
            BatchArrays {
                n_seq_id: &[1, 2, 2],
                seq_ids: &[2, 2, 1, 2, 1],
                wants_output: &[0, LOGITS, LOGITS | DRAFT],
                ..arrays
            },
        ),
    ];
    for (row, arrays) in wrong {
        assert_eq!(batch_error(arrays), BatchError::Draft { row });
    }
}

#[test]
fn every_error_names_its_row_and_numbers() {
    let error = batch_error(BatchArrays { positions: &[0, 16], ..ARRAYS });
    assert_eq!(error.to_string(), "row 1: position 16 is outside 0 to 15");
}
