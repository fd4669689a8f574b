//! Runs the example of README as a documentation test.
#![doc = include_str!("../../README.md")]
