//! A ledger's table of stream records.

use portolan_transport::host::TableFull;
use portolan_transport::ident::{RecordId, StreamKey};

/// One direction of one stream, as the ledger keeps it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) stream: StreamKey,
    pub(super) incarnation: u64,
    pub(super) epoch: u32,
    /// Next to send, or base.
    pub(super) next: u32,
    /// See [`after_commit`](portolan_transport::host::after_commit); receiving only.
    pub(super) bits: u32,
    /// The opening of the local port it belongs to.
    pub(super) port_generation: u32,
}

/// The table; rows keep their number.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) rows: Vec<Option<Record>>,
    free: Vec<u32>,
}

impl Records {
    pub(super) fn insert(&mut self, max: usize, record: Record) -> Result<RecordId, TableFull> {
        if let Some(free) = self.free.pop() {
            self.rows[free as usize] = Some(record);
            return Ok(RecordId(free));
        }
        if self.rows.len() >= max {
            return Err(TableFull);
        }
        self.rows.push(Some(record));
        Ok(RecordId(self.rows.len() as u32 - 1))
    }

    pub(super) fn remove(&mut self, record: RecordId) -> Option<Record> {
        let row = self.rows.get_mut(record.0 as usize)?.take();
        if row.is_some() {
            self.free.push(record.0);
        }
        row
    }

    pub(super) fn get_mut(&mut self, record: RecordId) -> Option<&mut Record> {
        self.rows.get_mut(record.0 as usize)?.as_mut()
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (RecordId, Record)> {
        let numbered = (0..).zip(&self.rows);
        numbered.filter_map(|(row, record)| Some((RecordId(row), (*record)?)))
    }
}
