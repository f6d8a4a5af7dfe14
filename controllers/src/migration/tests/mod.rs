//! Tests of decisions about migrations.
