//! Concurrent reviews.

use anyhow::{Result, ensure};
use futures::future::join_all;

use crate::{
    answers::response,
    conformance,
    reviews::{Review, bad, good},
};

const REVIEWS: usize = 1000;
/// Number of connections if each passes the API server and a kubelet, which are not under test.
const FORWARDED: usize = 50;

#[test]
fn a_thousand_concurrent_reviews_are_answered() {
    conformance(async |endpoint| {
        let lanes = if endpoint.is_direct() { REVIEWS } else { FORWARDED };
        println!("{REVIEWS} reviews over {lanes} connections");
        // Forwarded ones are slow to open, and the server closes those that stay silent.
        let mut open = if endpoint.is_direct() { endpoint.connect_many(lanes).await? } else { vec![] };
        let mut questions: Vec<Vec<Review>> = vec![vec![]; lanes];
        for index in 0..REVIEWS {
            let all = if index.is_multiple_of(4) { bad() } else { good() };
            questions[index % lanes].push(all[index % all.len()].clone());
        }
        let asked =
            questions.into_iter().map(|questions| (open.pop(), questions)).map(|(open, questions)| async move {
                let mut connection = match open {
                    Some(connection) => connection,
                    None => endpoint.connect().await?,
                };
                for review in &questions {
                    let answer = match connection.review(review.path, review.body()).await {
                        Ok(answer) => answer,
                        // The server closes a connection that was silent for seconds, as the first ones on a busy host.
                        Err(_) => endpoint.connect().await?.review(review.path, review.body()).await?,
                    };
                    response(&answer, &review.uid)?;
                }
                Ok::<usize, anyhow::Error>(questions.len())
            });
        let answered = join_all(asked).await.into_iter().sum::<Result<usize>>()?;
        ensure!(answered == REVIEWS, "{answered} of {REVIEWS} were answered");
        Ok(())
    });
}
