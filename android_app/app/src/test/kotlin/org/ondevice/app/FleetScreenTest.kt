package org.ondevice.app

import android.content.Context
import android.content.Intent
import android.net.Uri
import android.os.PowerManager
import org.junit.After
import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.ondevice.core.Json
import org.ondevice.core.PipeProgram
import org.ondevice.core.Program
import org.ondevice.core.Tensor
import org.ondevice.core.Thermal
import org.robolectric.Robolectric
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import java.io.ByteArrayInputStream
import java.io.File

/** The rounds of Python's fleet (`fleet_rounds.py`) through the screen, the service and the share sheet. */
class FleetScreenTest : AppTest() {
    private val place by lazy { File(fixtures, "fleet") }
    private val said by lazy { Json.parse(File(place, "fleet.json").readText()) as Map<*, *> }
    private val hashes by lazy { said["hashes"] as List<*> }

    private fun file(name: String) = File(place, "$name.odfleet").readBytes()

    private fun heat(status: Int) = shadowOf(app.getSystemService(Context.POWER_SERVICE) as PowerManager).setCurrentThermalStatus(status)

    /** One Python for all rounds. */
    private object OfTheFleet : Program {
        val pipe by lazy { PipeProgram(File(fixtures, "fleet artifact"), property("ondevice.python"), File(property("ondevice.root")).canonicalFile) }

        @Synchronized
        override fun execute(method: String, inputs: List<Tensor>, layer: Int) = pipe.execute(method, inputs, layer)

        override fun close() = Unit
    }

    private fun member() {
        importModel("fleet", File(fixtures, "fleet artifact"))
        importData()
        app.openProgram = { OfTheFleet }
    }

    /** As another app gives a file. */
    private fun sent(name: String, bytes: ByteArray = file(name), action: String = Intent.ACTION_SEND) {
        val uri = Uri.parse("content://mail/$name.odfleet")
        shadowOf(app.contentResolver).registerInputStream(uri, ByteArrayInputStream(bytes))
        val intent = Intent(app, MainActivity::class.java).setAction(action)
        controller = Robolectric.buildActivity(MainActivity::class.java, if (action == Intent.ACTION_VIEW) intent.setData(uri) else intent.putExtra(Intent.EXTRA_STREAM, uri)).setup()
        until("the file to be read") { app.jobs.words(FleetScreen.PLACE) == null }
    }

    private fun takePart() {
        click(R.id.take_part)
        trainService = null
        service()
    }

    private fun taken() {
        takePart()
        until("the round to end", 120) { !app.rounds.isWorking }
    }

    @After
    fun endRound() {
        heat(Thermal.NONE)
        app.rounds.stop()
        until("the round to end") { !app.rounds.isWorking }
    }

    @Test
    fun takesPartAndSharesTheAnswer() {
        open(MainActivity.FLEET)
        untilSaid("Not in a fleet yet")
        sent("round-0-0")
        untilSaid("None of the models here is the fleet’s", "Taking part needs rows")
        assertNull("nothing is joined by looking", app.rounds.standing)
        member()
        sent("round-0-0", action = Intent.ACTION_VIEW)
        untilSaid("Local steps\n2", "reviews.jsonl (23)")
        shot("fleet-offer")
        heat(Thermal.SEVERE)
        takePart()
        until("the pause") { app.rounds.live?.reasons?.isNotEmpty() == true }
        untilSaid("Local step 0 of 2", "the phone is hot")
        assertEquals("Taking part in a fleet", shadowOf(shadowOf(trainService).lastForegroundNotification).contentTitle.toString())
        shot("fleet-paused")
        click(R.id.stop)
        service(TrainService.STOP)
        until("the stop") { !app.rounds.isWorking }
        assertNotNull("a stopped round may be taken again", app.rounds.offer)
        heat(Thermal.NONE)
        taken()
        assertNull(app.rounds.live!!.error)
        assertTrue("no run was there to be told of", shadowOf(trainService).isStoppedBySelf)
        untilSaid("The reply is ready")
        shot("fleet-answer")
        while (shadowOf(app).nextStartedActivity != null) Unit
        click(R.id.share)
        until("the share sheet") { shadowOf(app).peekNextStartedActivity() != null }
        @Suppress("DEPRECATION")
        val send = shadowOf(app).nextStartedActivity.getParcelableExtra<Intent>(Intent.EXTRA_INTENT)!!
        @Suppress("DEPRECATION")
        val uri = send.getParcelableExtra<Uri>(Intent.EXTRA_STREAM)!!
        assertEquals("application/octet-stream" to Intent.FLAG_GRANT_READ_URI_PERMISSION, send.type to send.flags)
        val provider = ShareProvider().apply { attachInfo(app, android.content.pm.ProviderInfo().apply { authority = "org.ondevice.app.share"; grantUriPermissions = true }) }
        val bytes = java.io.FileInputStream(provider.openFile(uri, "r").fileDescriptor).use { it.readBytes() }
        assertArrayEquals(file("answer-0"), bytes)
        assertTrue("${bytes.size} bytes", bytes.size < 2000)
    }

    @Test
    fun endsWithTheFleetsAdapter() {
        member()
        val away = (said["away"] as List<*>).map { (it as Long).toInt() }
        val rounds = (said["rounds"] as Long).toInt()
        for (number in (0 until rounds) - away.toSet()) {
            for (name in place.list()!!.filter { it.startsWith("round-$number-") }.sorted()) {
                sent(name.removeSuffix(".odfleet"))
                taken()
                assertNull("round $number: ${app.rounds.live?.error}", app.rounds.live?.error)
            }
            assertArrayEquals("round $number", file("answer-$number"), app.rounds.standing!!.answer!!.readBytes())
        }
        sent("end-0")
        untilSaid("Follow these rounds")
        taken()
        assertEquals(hashes.last(), app.rounds.standing!!.hash)
        untilSaid(hashes.last() as String)
        assertNull("an answer of a round that is over is no longer offered", app.rounds.standing!!.answer)
        click(R.id.save)
        val adapters = app.store.adapters(app.store.models()[0].artifact!!)
        assertEquals((said["adapter"] as List<*>).map { (it as Number).toFloat() }, adapters.activeVector().toList())
        shot("fleet-member")
    }

    @Test
    @Config(qualifiers = "+de")
    fun refusesInWords() {
        member()
        sent("answer-0")
        untilSaid("is an answer on its way to the server")
        sent("round-1-0")
        untilSaid("in no fleet yet")
        sent("round-0-0", ByteArray(70_000))
        untilSaid("carries no round of a fleet")
        sent("round-0-0", file("round-0-0").also { it[20] = (it[20] + 1).toByte() })
        untilSaid("is damaged")
        assertNull(app.rounds.offer)
        sent("round-0-0")
        untilSaid("Mitmachen")
        taken()
        sent("round-9-0")
        taken()
        untilSaid("does not follow")
        shot("fleet-german")
        val private = Intent(app, MainActivity::class.java).setAction(Intent.ACTION_VIEW).setData(Uri.fromFile(File(app.filesDir, "fleet/charter.json")))
        controller = Robolectric.buildActivity(MainActivity::class.java, private).setup()
        assertFalse("files of our own are opened for nobody", activity.screen is FleetScreen)
        activity.open(MainActivity.FLEET)
        click(R.id.delete)
        assertTrue("Flotte" in confirm())
        assertFalse(app.rounds.isMember)
        untilSaid("Noch in keiner Flotte")
    }
}
