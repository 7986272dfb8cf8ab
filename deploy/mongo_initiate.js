// Forms the replica set `agentrl` out of the three members, once. Run by the `initiate` service of mongo.compose.yml.
// The password comes from the environment, so that it stands in no command line.
const host = process.env.MONGO_HOST;
const password = encodeURIComponent(process.env.MONGO_ROOT_PASSWORD);
const admin = connect(`mongodb://root:${password}@localhost:27017/admin?directConnection=true`);

try {
  admin.adminCommand({ replSetGetStatus: 1 });
} catch (error) {
  if (error.codeName !== "NotYetInitialized") throw error;
  const members = [27017, 27018, 27019].map((port, index) => ({ _id: index, host: `${host}:${port}` }));
  admin.adminCommand({ replSetInitiate: { _id: "agentrl", members } });
}

for (let second = 0; second < 60; second++) {
  if (admin.hello().isWritablePrimary || admin.hello().primary) quit(0);
  sleep(1000);
}
print("no primary was elected within 60 s");
quit(1);
