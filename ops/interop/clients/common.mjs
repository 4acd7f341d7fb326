// The part that the programs of all clients of npm share.
import { readFileSync } from "node:fs";

// Questions and files, written by the runner.
export const CASES = JSON.parse(readFileSync(0, "utf8"));

// Print the result of each check as one JSON object. A failed check has a text.
export async function report(checks) {
  const results = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      results[name] = (await check()) ?? null;
    } catch (error) {
      results[name] = `${error.constructor.name}: ${error.message}`;
    }
  }
  process.stdout.write(JSON.stringify(results));
}

// Return the class and the status of the exception that a call throws.
export async function failureOf(call) {
  try {
    await call();
  } catch (error) {
    return `${error.constructor.name} ${error.status ?? error.statusCode ?? ""}`.trim();
  }
  return "no exception";
}
