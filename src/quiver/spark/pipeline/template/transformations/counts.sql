-- Lines by minute, level and producer, of all that is parsed by now: made anew with each run.
CREATE MATERIALIZED VIEW counts
USING parquet
AS SELECT window(event_time, '1 minute').start AS minute, level, producer, count(*) AS lines
FROM parsed
GROUP BY window(event_time, '1 minute'), level, producer;
